"""Prompts that an earlier engine has had, read from its disk tier, beside the same prompts computed.

::

    engine 1   | compute prompt 1 | compute prompt 2 | ... | stop: all is written
                 the files leave the page cache
    engine 2   | read prompt 1    | read prompt 2    | ...
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.offline.engines import TpEngine
from benchmarks.paging.decoding import generate

GOAL = 5.0
"""How many times sooner a prompt's first token comes after a restart than without the disk."""


def disk_options(folder: Path, num_tokens: int, block_size: int, size_gib: float) -> dict[str, Any]:
    """Options of an engine with a disk tier in ``folder``; pool, host and disk hold all prompts of ``num_tokens``."""
    return {
        "block_size": block_size,
        "max_model_len": num_tokens + 2,
        "max_num_seqs": 4,
        "kv_offloading_size": size_gib,
        "kv_disk_path": str(folder),
        "kv_disk_size": size_gib,
    }


def compare_restart(
    start: Callable[[], TpEngine], folder: Path, *, vocab_size: int, num_tokens: int, block_size: int, rounds: int
) -> dict[str, Any]:
    """Medians over ``rounds`` prompts: seconds to the first token, computed by one engine and read by the next.

    Raises ``RuntimeError`` if a prompt was not read as a whole, or if its token is another one than before.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab_size, num_tokens).tolist() for _ in range(rounds)]
    warm_up = rng.integers(3, vocab_size, num_tokens).tolist()
    seconds: list[list[float]] = []
    tokens: list[list[list[int]]] = []
    for _ in range(2):
        engine = start()
        try:
            generate(engine, warm_up, 1)
            found = [generate(engine, prompt, 1) for prompt in prompts]
            report = engine.llm.engine.report()
        finally:
            engine.close()
        _forget_pages(folder)
        tokens.append([one for one, _ in found])
        seconds.append([one[0] for _, one in found])
    num_read = (num_tokens - 1) // block_size * block_size * rounds
    if report.stats.num_disk_hit_tokens < num_read or tokens[0] != tokens[1]:
        raise RuntimeError(f"{report.stats.num_disk_hit_tokens} of {num_read} tokens were read; tokens {tokens}")
    assert report.disk_moves is not None
    computed, read = (statistics.median(values) for values in seconds)
    return {
        "tokens": num_tokens,
        "rounds": rounds,
        "first_token_computed_ms": round(computed * 1e3, 3),
        "first_token_read_ms": round(read * 1e3, 3),
        "ratio": round(computed / read, 2),
        "disk_gb_per_s": round(report.disk_moves.read_bytes / report.disk_moves.read_s / 1e9, 2),
        "goal": GOAL,
    }


def _forget_pages(folder: Path) -> None:
    """Let the files' pages leave the page cache, so that the next reads come from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
