"""Reload an evicted prompt from the host tier, and compute one of the same length.

One engine, whose pool holds two prompts.  In each round a new prompt is computed, and that of four rounds before, which
the pool has lost since, comes back::

    round r      | compute prompt r | reload prompt r - 4 |
    pool         | r - 5 .. r - 4   |  what came last
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.offline.engines import TpEngine
from benchmarks.paging.decoding import generate

GOAL = 10.0
"""How many times faster a block is reloaded than computed."""

_AGO = 4


def engine_options(num_tokens: int, block_size: int, size_gib: float) -> dict[str, Any]:
    """Options of an engine whose pool holds two prompts of ``num_tokens``."""
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": 2 * (num_tokens // block_size + 2),
        "max_model_len": num_tokens + 2,
        "max_num_seqs": 4,
        "kv_offloading_size": size_gib,
    }


def compare_reload(
    engine: TpEngine, *, vocab_size: int, num_tokens: int, block_size: int, rounds: int
) -> dict[str, Any]:
    """Medians over ``rounds``: seconds to the first token of both kinds of prompt, and seconds of a block.

    A block's reload is its part of the time that the step waited for moves; its computation is its part of the prompt.
    Raises ``RuntimeError`` if a prompt was not reloaded as a whole, or if its token is another one than before.
    """
    core, rng = engine.llm.engine, np.random.default_rng(0)
    num_blocks = (num_tokens - 1) // block_size  # the last token is always computed
    prompts: list[list[int]] = []
    first_tokens: list[list[int]] = []
    computed_s, reloaded_s, moved_s, block_bytes = [], [], [], 0
    for number in range(rounds + 2 * _AGO):
        prompts.append(rng.integers(3, vocab_size, num_tokens).tolist())
        tokens, seconds = generate(engine, prompts[-1], 1)
        first_tokens.append(tokens)
        if number < _AGO:
            continue
        before = core.report()
        again, reload_seconds = generate(engine, prompts[number - _AGO], 1)
        after = core.report()
        assert before.moves is not None and after.moves is not None
        num_loaded = after.stats.num_loaded_blocks - before.stats.num_loaded_blocks
        if num_loaded < num_blocks or again != first_tokens[number - _AGO]:
            raise RuntimeError(f"{num_loaded} of {num_blocks} blocks were reloaded; tokens {again}, not {first_tokens}")
        if number >= 2 * _AGO:
            computed_s.append(seconds[0])
            reloaded_s.append(reload_seconds[0])
            moved_s.append((after.moves.load_s - before.moves.load_s) / num_loaded)
            block_bytes = (after.moves.loaded_bytes - before.moves.loaded_bytes) // num_loaded
    computed, reloaded, moved = (statistics.median(values) for values in (computed_s, reloaded_s, moved_s))
    per_block = computed * block_size / num_tokens
    return {
        "tokens": num_tokens,
        "rounds": rounds,
        "block_bytes": block_bytes,
        "first_token_computed_ms": round(computed * 1e3, 3),
        "first_token_reloaded_ms": round(reloaded * 1e3, 3),
        "first_token_ratio": round(computed / reloaded, 2),
        "block_computed_us": round(per_block * 1e6, 2),
        "block_reloaded_us": round(moved * 1e6, 2),
        "block_ratio": round(per_block / moved, 1),
        "goal": GOAL,
    }
