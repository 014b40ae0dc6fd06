"""Which of a row's blocks each group of layers needs.  Oracle: sets of keys, position by position."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.unit.kernels.kernel_harness import needs_triton
from tests.unit.sched.scheduler_harness import limits
from tp_engine.model_config.kv_layout import TILE_TOKENS
from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.kv_windows import KvWindows

NATIVE_TYPES = Path(__file__).parents[3] / "tp_engine" / "cpu" / "attention_types.h"


def keys_read(position: int, window: int | None, tile: int) -> range:
    """The keys that a kernel touches for a query at ``position``: the visible ones, and those before them in their
    tile."""
    first = 0 if window is None else max(0, position - window + 1)
    while first % tile:
        first -= 1
    return range(first, position + 1)


def suffices(there: BoolArray, number: int, windows: Sequence[int | None], size: int, tile: int) -> bool:
    """Whether the present blocks hold all keys before the end of block ``number`` that the next query reads."""
    end = number * size
    keys = [(key, group) for group, window in enumerate(windows) for key in keys_read(end, window, tile) if key < end]
    return all(there[key // size, group] for key, group in keys)


def test_golden_first_block() -> None:
    """By hand, the drawing: at position 18 a window of 8 begins in the tile, and the block, that begins at 8."""
    windows = KvWindows((None, 8), 4, 4)
    assert windows.first_needed(18).tolist() == [0, 2]
    assert windows.first_needed(np.array([0, 11, 14, 15, 19])).tolist() == [[0, 0], [0, 1], [0, 1], [0, 2], [0, 3]]
    assert (windows.num_groups, windows.has_full, windows.has_windows) == (2, True, True)


def test_the_first_block_is_the_one_of_the_first_key_that_is_read() -> None:
    """Oracle: all positions up to 80, for many windows, tiles and blocks."""
    for window in (None, 1, 2, 7, 8, 33):
        for tile in (1, 4, 16):
            for block in (1, 3, 4, 16):
                first = KvWindows((window,), block, tile).first_needed(np.arange(80))[:, 0]
                assert first.tolist() == [keys_read(position, window, tile)[0] // block for position in range(80)]


def test_the_longest_hit_is_the_longest_that_suffices() -> None:
    """Oracle: the definition, from all blocks downwards: every block with a key that the next token reads."""
    rng = random.Random(5)
    for _ in range(400):
        given = tuple(rng.choice((None, 1, 3, 8, 20)) for _ in range(rng.randint(1, 3)))
        size, tile, count = rng.choice((1, 3, 4)), rng.choice((1, 4)), rng.randint(0, 12)
        there = np.array([[rng.random() < 0.6 or window is None for window in given] for _ in range(count)])
        there = there.reshape(count, len(given))

        expected = next(number for number in range(count, -1, -1) if suffices(there, number, given, size, tile))
        assert KvWindows(given, size, tile).longest_hit(there) == expected


@pytest.mark.parametrize("window", [None, 1, 8, 30])
@pytest.mark.parametrize("chunk", [1, 5, 16, 50])
def test_most_blocks_is_never_exceeded_and_reached(window: int | None, chunk: int) -> None:
    """Oracle: the blocks with a key read or written while 150 tokens arrive in chunks, from any first chunk on."""
    for size, tile in ((4, 4), (4, 1), (3, 8), (16, 4)):
        windows = KvWindows((window,), size, tile)
        most = 0
        for offset in range(chunk):
            for start in range(offset, 150, chunk):
                last = min(150, start + chunk) - 1
                most = max(most, last // size - keys_read(start, window, tile)[0] // size + 1)
        bound = windows.most_blocks(-(-150 // size), chunk)
        assert most <= bound <= most + 1


def test_capacity_of_a_pool() -> None:
    """By hand, blocks of 4: ten blocks hold 40 tokens in one group and 20 in two; with a window of 8 and tiles of 4,
    which take 4 blocks, six are left for the full group; with windows alone, four blocks do for any length."""
    assert limits(num_blocks=10).capacity_tokens == 40
    assert limits(num_blocks=10, windows=(None, None)).capacity_tokens == 20
    assert limits(num_blocks=10, windows=(None, 8), tile_tokens=4).capacity_tokens == 24
    assert limits(num_blocks=10, windows=(None, 8), tile_tokens=4, max_model_len=10).capacity_tokens == 12
    assert limits(num_blocks=4, windows=(8,), tile_tokens=4, max_model_len=9999).capacity_tokens == 10000
    assert limits(num_blocks=3, windows=(8,), tile_tokens=4, max_model_len=9999).capacity_tokens == 12
    assert limits(num_blocks=1, windows=(None, 8)).capacity_tokens == 0


def test_a_chunk_takes_a_quarter_of_the_pool_at_most() -> None:
    """By hand: 80 blocks of 4 in two groups are 160 tokens; with a window, at most 40 may come at once."""
    assert limits(num_blocks=80, windows=(None, 8), max_num_batched_tokens=99).max_chunk_tokens == 40
    assert limits(num_blocks=80, windows=(None, 8), max_num_batched_tokens=32).max_chunk_tokens == 32
    assert limits(num_blocks=80, windows=(None, None), max_num_batched_tokens=99).max_chunk_tokens == 99
    assert limits(num_blocks=3, windows=(None, 8)).max_chunk_tokens == 4


@needs_triton
def test_no_kernel_begins_further_before_a_window_than_a_tile() -> None:
    """Oracle: the kernels' own sizes.  Their tiles must divide ``TILE_TOKENS``, where the kept blocks begin."""
    from tp_engine.kernels.attention.paged_decode_triton import decode_sizes
    from tp_engine.kernels.attention.paged_prefill_triton import prefill_sizes

    tiles = {int(native) for native in re.findall(r"\bTILE = (\d+)", NATIVE_TYPES.read_text(encoding="utf-8"))}
    assert len(tiles) == 2, "with AVX-512 and without"
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for itemsize in (1, 2, 4):
            tiles.add(prefill_sizes(head_dim, itemsize).tile)
            tiles |= {decode_sizes(8, 8, head_dim, itemsize, 132, is_quantised=quant).tile for quant in (False, True)}
    assert {32, 64, 128} <= tiles and all(TILE_TOKENS % tile == 0 for tile in tiles)
