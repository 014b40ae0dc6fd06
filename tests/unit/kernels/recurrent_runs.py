"""Runs of tokens for the tests of layers whose state is a matrix per value head, and what holds for each such layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch

from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

Runs: TypeAlias = list[tuple[int, int | None, bool]]
# Tokens, slot, is_fresh: shorter than the convolution, as long as a block of 32 tokens, and longer; None is not kept.
RUNS: Runs = [(1, 4, False), (33, 1, True), (2, 6, False), (70, None, False), (32, 0, False), (5, 3, True)]
NUM_SLOTS = 8
UNUSED = [2, 5, 7, 8]  # of these and the one for padding


# The decode, and chunks, of some of a test's rows.
Step: TypeAlias = Callable[[slice, LayerStates, torch.Tensor], torch.Tensor]
Prefill: TypeAlias = Callable[[slice, LayerStates, list[Chunk]], torch.Tensor]


def chunks_of(runs: Runs) -> list[Chunk]:
    """The chunks of tokens that follow one another."""
    starts = [sum(count for count, *_ in runs[:index]) for index in range(len(runs))]
    return [Chunk(start, *run) for start, run in zip(starts, runs, strict=True)]


def random_states(kind: StateKind, num_slots: int) -> LayerStates:
    """With one slot more, which padding may write to."""
    matrices = (num_slots + 1, kind.num_value_heads, kind.key_dim, kind.value_dim)
    return LayerStates(torch.randn(num_slots + 1, kind.taps - 1, kind.num_channels), torch.randn(matrices))


def copy_of(states: LayerStates) -> LayerStates:
    """The same numbers elsewhere."""
    return LayerStates(*(part.clone() for part in states))


def check_chunks(
    chunks: list[Chunk], before: LayerStates, found: torch.Tensor, states: LayerStates, step: Step, prefill: Prefill
) -> None:
    """What ``chunks`` gave, ``found`` and ``states``, is bit by bit what their tokens give one by one, and in other
    chunks and batches with another number of threads; slots that no chunk names stay as they were ``before``."""
    by_steps, in_parts = copy_of(before), copy_of(before)
    assert all(torch.equal(own[UNUSED], old[UNUSED]) for own, old in zip(states, before, strict=True))
    for start, count, slot, is_fresh in chunks:
        place = NUM_SLOTS - 1 if slot is None else slot
        if slot is None or is_fresh:
            by_steps.conv[place], by_steps.recurrent[place] = 0.0, 0.0
        for token in range(start, start + count):
            row = slice(token, token + 1)
            assert torch.equal(step(row, by_steps, torch.tensor([place]).int()), found[row])

    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(num_threads, 2))
    try:
        for start, count, slot, is_fresh in reversed(chunks):
            cuts = sorted({0, 1, 3, 32, 50, count} & set(range(count + 1))) if slot is not None else [0, count]
            for first, end in pairwise(cuts):
                rows = slice(start + first, start + end)
                piece = [Chunk(0, end - first, slot, is_fresh and first == 0)]
                assert torch.equal(prefill(rows, in_parts, piece), found[rows])
    finally:
        torch.set_num_threads(num_threads)
    for own, steps, parts in zip(states, by_steps, in_parts, strict=True):
        assert torch.equal(own, parts)
        steps[NUM_SLOTS - 1] = own[NUM_SLOTS - 1]
        assert torch.equal(own, steps)
