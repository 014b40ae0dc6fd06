"""Entries that stand for many tokens, against a softmax over the whole of each window."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tp_engine.kernels.compression import CompressionRule, compress_decode, compress_prefill, joined
from tp_engine.kernels.recurrent import Chunk, LayerStates

WIDTH, LENGTH = 5, 19


def expected(made: torch.Tensor, rule: CompressionRule) -> torch.Tensor:
    """The entries of all complete windows (windows, width), each a softmax over its tokens."""
    values, gates = made.double().unflatten(1, (2, rule.num_series, WIDTH)).unbind(1)
    gates = gates + rule.bias.double().repeat(-(-len(made) // rule.rate), 1, 1)[: len(made)]
    found = []
    for first in range(0, len(made) - rule.rate + 1, rule.rate):
        own = slice(first, first + rule.rate)
        v, g = values[own, -1], gates[own, -1]
        if rule.num_series == 2 and first:
            before = slice(first - rule.rate, first)
            v, g = torch.cat((values[before, 0], v)), torch.cat((gates[before, 0], g))
        found.append((g.softmax(0) * v).sum(0))
    return torch.stack(found).float()


@pytest.mark.parametrize("num_series", [1, 2])
@pytest.mark.parametrize("rate", [1, 2, 4, 8])
@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 3, 9), (8, 12)])
def test_chunks_and_decodes_equal_the_whole(num_series: int, rate: int, cuts: tuple[int, ...]) -> None:
    """Oracle: the softmax over each window in float64, wherever the prompt is cut, the last tokens one by one; gates
    are as large as 100."""
    torch.manual_seed(rate)
    rule = CompressionRule(rate, num_series, WIDTH, torch.randn(rate, num_series, WIDTH))
    made = torch.randn(LENGTH, 2 * num_series * WIDTH) * torch.tensor(
        [1.0] * num_series * WIDTH + [40.0] * num_series * WIDTH
    )
    kept = 3 if num_series == 2 else 1
    states = LayerStates(torch.full((3, 1, kept * 3 * WIDTH), torch.nan), torch.empty(3, 0))
    found, bounds = [], [0, *cuts, LENGTH - 5]
    for first, end in pairwise(bounds):
        chunk = Chunk(0, end - first, 1, first == 0)
        found.append(compress_prefill(made[first:end], [first], rule, states, [chunk]))
    slots = torch.tensor([1], dtype=torch.int32)
    found += [
        compress_decode(made[place : place + 1], torch.tensor([place]), rule, states, slots)
        for place in range(LENGTH - 5, LENGTH)
    ]
    entries = torch.cat(found)[rate - 1 :: rate]
    torch.testing.assert_close(entries, expected(made, rule), atol=1e-5, rtol=1e-5)


def test_draft_rows_continue_their_row() -> None:
    """Oracle: the same tokens one by one; the row's own state stands before the drafts."""
    rule = CompressionRule(4, 2, WIDTH, torch.randn(4, 2, WIDTH))
    made = torch.randn(6, 4 * WIDTH)
    states = LayerStates(torch.zeros(4, 1, 9 * WIDTH), torch.empty(4, 0))
    one_by_one, rows = LayerStates(states.conv.clone(), states.recurrent), []
    for place in range(6):
        slots = torch.tensor([0], dtype=torch.int32)
        rows.append(compress_decode(made[place : place + 1], torch.tensor([place]), rule, one_by_one, slots))
    compress_prefill(made[:3], [0], rule, states, [Chunk(0, 3, 0, True)])
    slots, runs = (
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([[1, 2], [0, -1], [0, -1]], dtype=torch.int32),
    )
    found = compress_decode(made[3:], torch.tensor([3, 4, 5]), rule, states, slots, runs)
    torch.testing.assert_close(found, torch.cat(rows[3:]))
    torch.testing.assert_close(states.conv[2], one_by_one.conv[0])


def test_sums_without_a_token_change_nothing() -> None:
    """Oracle: the other sums, whatever their gates; of two without a token zeros."""
    sums = torch.randn(2, 3, WIDTH)
    sums[:, 1] = 1.0
    sums[0, 0] = -500.0
    torch.testing.assert_close(joined(torch.zeros(2, 3, WIDTH), sums), sums)
    assert not joined(torch.zeros(3, WIDTH), torch.zeros(3, WIDTH)).any()
