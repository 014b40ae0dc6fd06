"""Entries that stand for many tokens (``model_config/compression.py``), in plain PyTorch.

Each element of an entry is a softmax of its own: the sum over the tokens of its window of exp(gate) value, over the sum
of exp(gate).  Such a softmax goes on from token to token by three numbers, and two of them are joined as one::

    sums (..., 3, width) float32 = [ largest gate m | sum of exp(gate - m) | sum of exp(gate - m) value ]

A row's state has the sums of the window that is not complete; with two series those of the first series in the window
before, of the first one in this window, and of the second one in this window.  What has no token yet is zeros.
"""

from dataclasses import dataclass

import torch

from tp_engine.kernels.recurrent import Chunk, LayerStates, in_runs

_GATE, _WEIGHT, _VALUE = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class CompressionRule:
    """One layer's constants: an entry of ``width`` elements for ``rate`` tokens, of ``num_series`` 1 or 2; ``bias``
    (rate, num_series, width) float32 is added to the gates of a window's tokens."""

    rate: int
    num_series: int
    width: int
    bias: torch.Tensor

    def of_tokens(self, made: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The sums of single tokens (N, series, 3, width), at these ``places`` (N,) of their windows; ``made`` (N, 2
        series width) has their values, then their gates."""
        values, gates = made.float().unflatten(1, (2, self.num_series, self.width)).unbind(1)
        gates = gates + self.bias[places]
        return torch.stack((gates, torch.ones_like(gates), values), 2)


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two sums (..., 3, width) as one; either may have no token."""
    both = torch.stack((first, second))
    gates = both[..., _GATE, :].masked_fill(both[..., _WEIGHT, :] == 0, -torch.inf)
    largest = gates.amax(0)
    factors = (gates - largest.clamp(min=torch.finfo(gates.dtype).min)).exp()
    weights, values = ((both[..., part, :] * factors).sum(0) for part in (_WEIGHT, _VALUE))
    return torch.stack((largest.masked_fill(weights == 0, 0.0), weights, values), -2)


def entry_of(sums: torch.Tensor) -> torch.Tensor:
    """The entry (..., width) of sums, which have a token."""
    return sums[..., _VALUE, :] / sums[..., _WEIGHT, :]


def compress_decode(
    made: torch.Tensor,
    positions: torch.Tensor,
    rule: CompressionRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance B rows by a token each at ``positions`` (B,): the entry (B, width) float32 that each window has so far.

    ``slots`` and ``runs`` are as for ``gated_delta_net.gated_delta_net_decode``.
    """

    def step(rows: list[int] | slice) -> torch.Tensor:
        places = torch.where(slots[rows] < 0, len(states.conv) - 1, slots[rows]).long()
        at = positions[rows] % rule.rate
        new = rule.of_tokens(made[rows], at)
        kept = states.conv.index_select(0, places).view(len(new), -1, 3, rule.width)
        begins = (at == 0)[:, None, None]
        current = joined(kept[:, -rule.num_series :].masked_fill(begins[:, None], 0.0), new)
        found = entry_of(current[:, -1])
        if rule.num_series == 2:
            before = torch.where(begins, kept[:, 1], kept[:, 0])
            found = entry_of(joined(before, current[:, 1]))
            current = torch.cat((before[:, None], current), 1)
        states.conv.index_copy_(0, places, current.flatten(1)[:, None])
        return found

    return in_runs(step, states, slots, runs)


def compress_prefill(
    made: torch.Tensor,
    first_positions: list[int],
    rule: CompressionRule,
    states: LayerStates | None,
    chunks: list[Chunk],
) -> torch.Tensor:
    """The same of ``chunks`` of prompts, whose first tokens are at ``first_positions``: (N, width), for a window's
    last token the entry, for others that of their window as far as it is known."""
    found = []
    for (start, count, slot, is_fresh), first in zip(chunks, first_positions, strict=True):
        num_kept = 3 if rule.num_series == 2 else 1
        kept = made.new_zeros(num_kept, 3, rule.width, dtype=torch.float32)
        if slot is not None and not is_fresh and states is not None:
            kept = states.conv[slot].view(num_kept, 3, rule.width)
        entries, behind = _compress_chunk(made[start : start + count], first, rule, kept)
        if slot is not None and states is not None:
            states.conv[slot].copy_(behind.flatten()[None])
        found.append(entries)
    return torch.cat(found)


def _compress_chunk(
    made: torch.Tensor, first: int, rule: CompressionRule, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of T tokens from position ``first`` on, after the sums ``kept``: (T, width), and the sums behind it."""
    positions = torch.arange(first, first + len(made), device=made.device, dtype=torch.int64)
    windows = positions // rule.rate - first // rule.rate
    tokens = rule.of_tokens(made, positions % rule.rate)
    count = (first + len(made) - 1) // rule.rate - first // rule.rate + 1
    current = _sums_of(tokens, windows, count)  # (windows, series, 3, width)
    if first % rule.rate:
        current[0] = joined(kept[-rule.num_series :], current[0])
    if rule.num_series == 1:
        return entry_of(current[:, 0])[windows], current[-1]
    before = torch.cat((kept[:1] if first % rule.rate else kept[1:2], current[:-1, 0]))
    entries = entry_of(joined(before, current[:, 1]))
    return entries[windows], torch.cat((before[-1:], current[-1]))


def _sums_of(tokens: torch.Tensor, windows: torch.Tensor, count: int) -> torch.Tensor:
    """The sums of ``count`` windows (count, series, 3, width) of single tokens, each in one of ``windows`` (T,)."""
    gates, _, values = tokens.unbind(2)
    like = gates.new_zeros(count, *gates.shape[1:])
    index = windows[:, None, None].expand_as(gates)
    largest = like.scatter_reduce(0, index, gates, "amax", include_self=False)
    weights = (gates - largest[windows]).exp()
    sums = like.index_add(0, windows, weights), like.index_add(0, windows, weights * values)
    return torch.stack((largest, *sums), 2)
