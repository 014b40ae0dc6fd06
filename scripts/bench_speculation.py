#!/usr/bin/env python
"""Speculation beside the same engine without it, in one run; the engines alternate and must give equal tokens.

    python scripts/bench_speculation.py --threads 1                    shape B and the demo model
    python scripts/bench_speculation.py --shape C --rounds 3 --config '{"method": "ngram"}'

=============  ========  ==============================================================================================
workload       model     requests
=============  ========  ==============================================================================================
again          shape     one, whose answer is known from a request before (agents, samples of one prompt)
random         shape     one, sampled at temperature 1 from random weights: nothing repeats
32 requests    shape     16 to 128 tokens in, 16 to 128 out, as in bench_offline.py
quote          demo      one at a time: "copy: ..." with eight words, new in each round
json           demo      one at a time, by a schema without white space: keys are forced, values are new
=============  ========  ==============================================================================================

Wall time, and CPU time of all threads, which other load of the machine disturbs less; medians of the rounds.  The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import processor_name
from benchmarks.shapes import DEMO_MODEL, make_folder
from benchmarks.workloads import latency, throughput
from demo_tasks import held_out_turn

from tp_engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tp_engine.model_config import load_model_config

_CONFIG = '{"method": "suffix", "num_speculative_tokens": 8}'
_SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 8},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_delivered": {"type": "boolean"},
        "payment_method": {"enum": ["card", "cash", "transfer"]},
    },
    "required": ["customer_name", "number_of_items", "is_delivered", "payment_method"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Job:
    """Requests of one call; with ``known``, they are answered once before, which is not measured."""

    prompts: list[Any]
    params: list[SamplingParams]
    known: bool = False
    is_chat: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Measure all workloads and print a table."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    report: dict[str, Any] = {
        "benchmark": "speculation", "machine": processor_name(), "threads": torch.get_num_threads(),
        "config": args.config, "shape": args.shape, "dtype": args.dtype, "workloads": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        shape = str(make_folder(Path(folder), args.shape, args.dtype))
        for model, jobs in ((shape, _of_shape(load_model_config(shape)[0].vocab_size)), (str(DEMO_MODEL), _of_demo())):
            report["workloads"] |= measure(args, model, jobs)
    print_table(report)
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="B", help="of the model with random weights (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--config", default=_CONFIG, help="--speculative-config (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's choice)")
    return parser.parse_args(arguments)


def _of_shape(vocab_size: int) -> dict[str, Callable[[int], Job]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)

    def batch(seed: int) -> Job:
        work = throughput(vocab_size, seed)
        return Job(work.prompts, [SamplingParams(max_tokens=n, seed=seed, ignore_eos=True) for n in work.max_tokens])

    return {
        "again": lambda seed: Job(latency(vocab_size, seed).prompts, [greedy], known=True),
        "random": lambda seed: Job(
            latency(vocab_size, seed).prompts, [SamplingParams(max_tokens=128, seed=seed, ignore_eos=True)]
        ),
        "32 requests": batch,
    }


def _of_demo() -> dict[str, Callable[[int], Job]]:
    def quote(seed: int) -> Job:
        question, _ = held_out_turn(random.Random(seed), "copy", 8)
        return Job(_asked(question), [SamplingParams(temperature=0.0, max_tokens=64)], is_chat=True)

    schema = StructuredOutputsParams(json=_SCHEMA, disable_any_whitespace=True)
    return {
        "quote": quote,
        "json": lambda seed: Job(
            _asked(f"copy: order number {seed}"),
            [SamplingParams(temperature=1.0, seed=seed, max_tokens=160, structured_outputs=schema)],
            is_chat=True,
        ),
    }


def _asked(question: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}]]


def measure(args: argparse.Namespace, model: str, jobs: dict[str, Callable[[int], Job]]) -> dict[str, dict[str, Any]]:
    """Each job on an engine without speculation and one with it, in turn."""
    options: dict[str, Any] = {"model": model, "dtype": args.dtype, "max_num_seqs": 64, "enable_prefix_caching": False}
    options |= {"max_model_len": 512, "num_gpu_blocks_override": 1024}
    with LLM(**options) as plain, LLM(**options, speculative_config=args.config) as guessing:
        found = {}
        for name, make in jobs.items():
            for seed in (1000, 1001):
                _run(plain, make(seed)), _run(guessing, make(seed))
            before = guessing.engine.stats().speculation
            rounds = []
            for seed in range(args.rounds):
                first, second = (plain, guessing) if seed % 2 else (guessing, plain)
                times = {id(engine): _run(engine, make(seed)) for engine in (first, second)}
                assert times[id(plain)][2] == times[id(guessing)][2], f"{name}: other tokens"
                rounds.append((*times[id(plain)][:2], *times[id(guessing)][:2]))
            after = guessing.engine.stats().speculation
            assert before is not None and after is not None
            found[name] = _summary(rounds, after.num_accepted_tokens - before.num_accepted_tokens, times[id(plain)][2])
            found[name]["guessed"] = after.num_draft_tokens - before.num_draft_tokens
            print(name, found[name], file=sys.stderr, flush=True)
        return found


def _run(engine: LLM, job: Job) -> tuple[float, float, list[list[int]]]:
    """Wall and CPU seconds, and the tokens."""
    answer: Callable[..., list[RequestOutput]] = engine.chat if job.is_chat else engine.generate
    if job.known:
        answer(job.prompts, job.params, use_tqdm=False)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = answer(job.prompts, job.params, use_tqdm=False)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return wall_s, cpu_s, [list(output.outputs[0].token_ids) for output in outputs]


def _summary(rounds: Sequence[tuple[float, ...]], num_accepted: int, tokens: list[list[int]]) -> dict[str, Any]:
    wall, cpu, fast_wall, fast_cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "plain_s": wall, "plain_cpu_s": cpu, "speculation_s": fast_wall, "speculation_cpu_s": fast_cpu,
        "wall_ratio": statistics.median(one[0] / one[2] for one in rounds),
        "cpu_ratio": statistics.median(one[1] / one[3] for one in rounds),
        "accepted": num_accepted, "tokens_of_last_round": sum(map(len, tokens)),
    }  # fmt: skip


def print_table(report: dict[str, Any]) -> None:
    """Print it as Markdown."""
    print(
        f"\n{report['machine']}, {report['threads']} threads, {report['shape']} {report['dtype']}, {report['config']}\n"
    )
    print("| workload | CPU s without, with | faster by CPU time | by wall time | guessed, right |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in report["workloads"].items():
        print(
            f"| {name} | {row['plain_cpu_s']:.3f}, {row['speculation_cpu_s']:.3f} | {row['cpu_ratio']:.2f}x | "
            f"{row['wall_ratio']:.2f}x | {row['guessed']}, {row['accepted']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
