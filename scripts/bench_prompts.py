"""Time to the first token, and steps that compute a prompt beside decodes, with and without CUDA graphs of prompts.

    python scripts/bench_prompts.py --shape qwen3-0.6b
    python scripts/bench_prompts.py --shape qwen3-8b --prompt-len 128 --batch-size 32

An engine for each of --sizes (values of --cuda-graph-prefill-sizes), one after the other, measures

* alone: a prompt with nothing beside it, until its first token is on the host;
* decodes: a step in which --batch-size requests decode;
* mixed: a step in which they decode and a prompt is computed too, one prompt after the other.

It also shows what the recordings cost, in seconds of the start and bytes of the ledger, and which share of the greedy
tokens equals the first engine's: in bfloat16 padding may make a library choose another product, which rounds
differently.  Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.machine import processor_name
from benchmarks.shapes import DUMMY_SHAPES, SHAPES, make_folder

_WARM_UP = 4


def main() -> int:
    """Measure and print."""
    args = parse_arguments()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.model) if args.model else make_folder(Path(name), args.shape, args.dtype)
        found = [measure(args, folder, sizes) for sizes in args.sizes.split(";")]
    first_tokens = found[0]["tokens"]
    for one in found:
        tokens = one.pop("tokens")
        one["equal_tokens"] = sum(a == b for a, b in zip(tokens, first_tokens, strict=True)) / len(tokens)
        print("  ".join(f"{key} {value}" for key, value in one.items()))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()
    report = {"benchmark": "prompts", "machine": device, "shape": args.model or args.shape, "dtype": args.dtype}
    report |= {"prompt_len": args.prompt_len, "batch_size": args.batch_size, "results": found}
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), *DUMMY_SHAPES], default="C")
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--sizes", default="none;auto", help="values of --cuda-graph-prefill-sizes, between semicolons")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32, help="requests that decode")
    parser.add_argument("--repeats", type=int, default=50, help="prompts alone, decode steps, and mixed steps")
    parser.add_argument("--threads", type=int, help="on a CPU; default: torch's")
    parser.add_argument("--engine-options", type=json.loads, default={}, help='more for LLM: {"enforce_eager": true}')
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, folder: Path, sizes: str) -> dict[str, Any]:
    """The figures of one engine, and the first tokens of the prompts that ran alone."""
    from tp_engine import LLM

    num_tokens = 2 * args.repeats + args.batch_size + 32  # the requests that decode outlive all that is measured
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": args.prompt_len + num_tokens,
        "max_num_seqs": args.batch_size + 8,
        "enable_prefix_caching": False,
        "cuda_graph_prefill_sizes": sizes,
    }
    if args.model is None and args.shape in DUMMY_SHAPES:
        options["load_format"] = "dummy"
    started = time.perf_counter()
    with LLM(str(folder), **(options | args.engine_options)) as llm:
        start_s = time.perf_counter() - started
        vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        requests = Requests(llm, vocab_size, args.prompt_len)
        alone, tokens = requests.alone(_WARM_UP + args.repeats)
        requests.start_decoding(args.batch_size, num_tokens)
        decodes, mixed = requests.steps(args.repeats, has_prompts=False), requests.steps(args.repeats, has_prompts=True)
        graph_bytes = llm.engine.report().ranks[0].memory["cuda_graphs"]
    return {
        "sizes": sizes,
        "ms_to_first_token": round(statistics.median(alone[_WARM_UP:]) * 1e3, 4),
        "decode_step_ms": round(decodes * 1e3, 4),
        "mixed_step_ms": round(mixed * 1e3, 4),
        "start_s": round(start_s, 2),
        "graph_mib": round(graph_bytes / 2**20, 1),
        "tokens": tokens,
    }


class Requests:
    """Greedy requests with random prompts, the same for each engine."""

    def __init__(self, llm: Any, vocab_size: int, prompt_len: int) -> None:
        self._llm, self._vocab_size, self._prompt_len = llm, vocab_size, prompt_len
        self._rng, self._count = np.random.default_rng(0), 0

    def alone(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds until the first token of each of ``count`` prompts, and these tokens."""
        times, tokens = [], []
        for _ in range(count):
            started = time.perf_counter()
            self._add(1)
            outputs: list[Any] = []
            while self._llm.engine.has_unfinished:
                outputs += self._llm.engine.step()
            times.append(time.perf_counter() - started)
            tokens += [token for output in outputs for token in output.new_token_ids]
        return times, tokens

    def start_decoding(self, count: int, num_tokens: int) -> None:
        """Let ``count`` requests decode, each for ``num_tokens`` tokens."""
        for _ in range(count):
            self._add(num_tokens)
        for _ in range(_WARM_UP + count):
            self._llm.engine.step()

    def steps(self, count: int, *, has_prompts: bool) -> float:
        """Seconds per step, results included; in each a new prompt begins if ``has_prompts``."""
        started = time.perf_counter()
        for _ in range(count):
            if has_prompts:
                self._add(1)
            self._llm.engine.step()
        return (time.perf_counter() - started) / count

    def _add(self, num_tokens: int) -> None:
        from tp_engine import SamplingParams

        prompt = self._rng.integers(3, self._vocab_size, self._prompt_len).tolist()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        self._count += 1
        self._llm.engine.add_request(self._llm.input_processor.process(prompt, params, request_id=str(self._count)))


if __name__ == "__main__":
    sys.exit(main())
