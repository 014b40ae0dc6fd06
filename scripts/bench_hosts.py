"""Tokens per second of an engine whose ranks torchrun has started, on one host or on several:

    torchrun --nproc-per-node 4 scripts/bench_hosts.py --model FOLDER
    torchrun --nnodes 2 --node-rank 0 --master-addr HEAD --nproc-per-node 2 scripts/bench_hosts.py --model FOLDER

``scripts/bench_offline.py`` writes models and compares engines on one host.  Each workload runs once to warm up, then
``--rounds`` times, each time with other prompts; rank 0 prints the medians, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from benchmarks.machine import processor_name
from benchmarks.workloads import WORKLOADS, Workload

from tp_engine import LLM, SamplingParams
from tp_engine.log import configure_logging


def seconds_of(llm: LLM, workload: Workload) -> float:
    """How long the workload takes, greedy, without ends."""
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in workload.max_tokens]
    started_s = time.perf_counter()
    llm.generate(workload.prompts, params, use_tqdm=False)
    return time.perf_counter() - started_s


def measure(llm: LLM, name: str, rounds: int) -> dict[str, Any]:
    """Median tokens per second of the workload ``name``, and every rank's share of time in collectives."""
    make, vocab_size = WORKLOADS[name], llm.engine.model_info.vocab_size
    seconds_of(llm, make(vocab_size, 0))
    before = [rank.collective_s for rank in llm.engine.report().ranks]
    taken = [seconds_of(llm, make(vocab_size, 1 + number)) for number in range(rounds)]
    time.sleep(0.6)  # what other hosts say is a quarter of a second old
    after = [rank.collective_s for rank in llm.engine.report().ranks]
    rates = [make(vocab_size, 1 + number).num_output_tokens / took_s for number, took_s in enumerate(taken)]
    shares = [(end - start) / sum(taken) for start, end in zip(before, after, strict=True)]
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "all_tokens_per_s": [round(rate, 1) for rate in rates],
        "share_in_collectives": [round(share, 3) for share in shares],
    }


def main() -> None:
    """Measure on rank 0; the other ranks serve it and end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model; equal on all hosts")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--all-reduce", default="auto")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["latency", "throughput"])
    parser.add_argument("--rounds", type=int, default=3)
    options = vars(parser.parse_args())
    configure_logging("bench")
    workloads, rounds = options.pop("workloads"), options.pop("rounds")
    with LLM(**options, max_model_len=2048, flight_recorder_dir="") as llm:
        found = {name: measure(llm, name, rounds) for name in workloads}
        places = [rank.host for rank in llm.engine.report().ranks]
    for name, figures in found.items():
        print(f"{name:16} {figures['tokens_per_s']:10,.1f} tokens/s   ranks on hosts {places}")
    about = {"benchmark": "hosts", "machine": processor_name(), "torch": torch.__version__, **options}
    print(json.dumps({**about, "hosts_of_ranks": places, "workloads": found}), flush=True)


if __name__ == "__main__":
    main()
