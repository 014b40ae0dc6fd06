"""Throughput of one engine with one pool: it admits requests while blocks last, or one request per reservation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.offline.engines import Engine, TpEngine
from benchmarks.workloads import Workload

PROMPT, OUTPUT = (64, 256), (64, 192)
DOCUMENTED = {1: 0.94, 4: 1.18, 8: 1.58, 16: 2.29}
"""The goal: requests at once -> how many times faster paging is than contiguous allocation."""

_WARM_UP_SEED = 1_000_000


def requests_at_once(vocab_size: int, seed: int, count: int, shrink: int = 1) -> Workload:
    """``count`` requests of 64-256 tokens in and 64-192 out; the lengths are the same for every seed."""
    rng, lengths = np.random.default_rng(seed), np.random.default_rng(count)
    prompts, outputs = (lengths.integers(low, high + 1, count) // shrink for low, high in (PROMPT, OUTPUT))
    ids = [rng.integers(3, vocab_size, size).tolist() for size in prompts]
    return Workload(f"{count} requests", ids, outputs.tolist())


def make_engines(model: str, options: Mapping[str, Any], *, max_len: int, num_reservations: int) -> dict[str, Engine]:
    """Two engines, each with a pool of ``num_reservations`` requests of ``max_len`` tokens.

    The contiguous one never admits more than ``num_reservations`` requests.  ``options`` are ``LLM``'s and include
    ``block_size``.
    """
    both = {**options, "max_model_len": max_len, "enable_prefix_caching": False}
    both["num_gpu_blocks_override"] = num_reservations * max_len // both["block_size"]
    return {
        "paged": TpEngine(model, both),
        "contiguous": TpEngine(model, both | {"max_num_seqs": num_reservations}),
    }


def compare_throughput(
    engines: Mapping[str, Engine], counts: Sequence[int], *, vocab_size: int, rounds: int, shrink: int = 1
) -> list[dict[str, Any]]:
    """Each engine's output tokens per second (the median of alternating rounds), and the ratio of paged to contiguous.

    ``shrink`` divides all lengths, for tests.
    """
    rows = []
    for count in counts:
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for seed in (_WARM_UP_SEED, *range(rounds)):
            workload = requests_at_once(vocab_size, seed, count, shrink)
            for name, engine in engines.items():
                taken = engine.run(workload).total_s
                if seed != _WARM_UP_SEED:
                    seconds[name].append(taken)
        tokens = workload.num_output_tokens
        row: dict[str, Any] = {name: round(tokens / statistics.median(taken), 1) for name, taken in seconds.items()}
        row |= {"requests": count, "ratio": round(row["paged"] / row["contiguous"], 3)}
        row["goal"] = DOCUMENTED.get(count)
        rows.append(row)
    return rows
