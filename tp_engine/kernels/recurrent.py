"""What layers with a recurrent state share: their states, chunks of prompts, draft rows, and the causal convolution, in
plain PyTorch.

A causal convolution makes each channel of a token from the token's own input and the ``taps - 1`` inputs before it,
which a row's state keeps::

    out_t = sum over i < taps of weight[i] input_(t - taps + 1 + i), plus a bias if there is one
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.model_config.kv_layout import StateKind


class LayerStates(NamedTuple):
    """One layer's states of all slots, float32: ``conv`` (slots, taps - 1, channels), ``recurrent`` (slots, VH, DK,
    DV).

    Both are strided views whose slots are contiguous.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor


Computed: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Outputs of a chunk's tokens, and both parts of the state after it."""


class Chunk(NamedTuple):
    """``num_tokens`` tokens of one row, from token ``start`` of the step on.

    Its state is in ``slot``; if it ``is_fresh``, the state before the first token is zero, whatever the slot holds.
    Without a slot (None) the state begins with zero and is not kept.
    """

    start: int
    num_tokens: int
    slot: int | None
    is_fresh: bool


def convolve_step(
    inputs: torch.Tensor, kept: torch.Tensor, places: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Convolve one token of each row: ``inputs`` (B, channels) after those in ``kept[places]`` -> (B, channels).

    ``kept`` (slots, taps - 1, channels) moves on by one token; ``weight`` (taps, channels); ``bias`` (channels,).
    """
    window = torch.cat((kept.index_select(0, places), inputs.unsqueeze(1)), 1)
    kept.index_copy_(0, places, window[:, 1:])
    turned = (window * weight).sum(1)
    return turned if bias is None else turned + bias


def convolve_chunk(
    inputs: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve a chunk of T tokens, ``inputs`` (T, channels) after ``kept`` (taps - 1, channels) -> (T, channels), and
    the inputs to keep."""
    window = torch.cat((kept, inputs))
    turned = F.conv1d(window.t().unsqueeze(0), weight.t().unsqueeze(1), bias, groups=inputs.shape[1])
    return turned.squeeze(0).t(), window[len(inputs) :]


def in_tiles(x: torch.Tensor, size: int, num_key_heads: int) -> torch.Tensor:
    """The tokens of a chunk in tiles of ``size``, the last one padded with zeros: (T, heads, ...) -> (KH, heads / KH,
    tiles, size, ...)."""
    padded = F.pad(x, (*(0,) * (2 * x.dim() - 1), -len(x) % size))
    tiles: torch.Tensor = padded.view(-1, size, *x.shape[1:]).movedim(2, 0)
    return tiles.reshape(num_key_heads, -1, *tiles.shape[1:])


def in_runs(
    step: Callable[[list[int] | slice], torch.Tensor],
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the tokens of B rows, those of rows with draft rows in order -> (B, width).

    ``step`` computes the rows that it gets and updates the states in their slots.  ``runs`` (B, 2) int32: the index of
    a row's first draft row, which its others follow, and their number, or (0, -1) for a draft row.
    """
    if runs is None:
        return step(slice(None))
    own = [(row, first, count) for row, (first, count) in enumerate(runs.tolist()) if count >= 0]
    rows = [row for row, _, _ in own]
    begun = step(rows)
    found = begun.new_empty((len(slots), begun.shape[1]))
    found[rows] = begun
    for place in range(1, 1 + max((count for _, _, count in own), default=0)):
        tokens = [first + place - 1 for _, first, count in own if count >= place]
        before = [first + place - 2 if place > 1 else row for row, first, count in own if count >= place]
        for part in states:
            part[slots[tokens].long()] = part[slots[before].long()]
        found[tokens] = step(tokens)
    return found


def in_chunks(
    compute: Callable[[slice, torch.Tensor, torch.Tensor], Computed],
    kind: StateKind,
    states: LayerStates | None,
    chunks: list[Chunk],
    like: torch.Tensor,
) -> torch.Tensor:
    """Compute the tokens of ``chunks``, in their order -> (N, width).

    ``compute`` gets the tokens of a chunk, and both parts of the state before it, in the type of ``like``.
    """
    found = []
    for start, count, slot, is_fresh in chunks:
        if slot is None or is_fresh or states is None:
            before = (
                like.new_zeros(kind.taps - 1, kind.num_channels),
                like.new_zeros(kind.num_value_heads, kind.key_dim, kind.value_dim),
            )
        else:
            before = states.conv[slot], states.recurrent[slot]
        out, *behind = compute(slice(start, start + count), *before)
        if slot is not None and states is not None:
            for part, own in zip(states, behind, strict=True):
                part[slot].copy_(own)
        found.append(out)
    return torch.cat(found)
