"""Inputs of a draft head's next pass, made on the device from those of the pass before, in plain PyTorch.

The twin of ``cpu/ops.py``.  No shape depends on a length, so a CUDA graph can hold it::

    n requests, of M blocks each     n = positions[i] + 1, at most limits[i] - 1, at least 0
    positions    (n,)   int64        n
    slot_mapping (n,)   int64        block_table[i, n // size] * size + n % size; -1 where positions[i] + 1 = limits[i]
    seq_lens     (n,)   int32        n + 1; 0 where limits[i] is 0: padding
    rope_positions (n,) int64        n + rope_deltas[i]; 0 for padding

The last is for models with M-RoPE (``decode_inputs``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from tp_engine.plan import PAD_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInputs:
    """Requests that have slots below ``limits`` (n,) int64, in ``block_table`` (n, M) int32; their rotary positions are
    their positions plus ``rope_deltas`` (n,) int32.  See the module's text."""

    positions: torch.Tensor
    limits: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    rope_deltas: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None

    @property
    def rotary_positions(self) -> torch.Tensor:
        """The rotary positions (n,) int64."""
        return self.positions if self.rope_positions is None else self.rope_positions

    def first(self, count: int) -> DraftInputs:
        """The inputs of the first ``count`` requests, in the same memory."""
        own = ((field.name, getattr(self, field.name)) for field in fields(self))
        first: dict[str, Any] = {name: None if one is None else one[:count] for name, one in own}
        return DraftInputs(**first)


def advance_drafts(inputs: DraftInputs, block_size: int) -> None:
    """Advance each request to its next position, in place."""
    following, limits = inputs.positions + 1, inputs.limits
    is_open = following < limits
    at = torch.minimum(following, limits - 1).clamp_(min=0)
    block = inputs.block_table.gather(1, (at // block_size)[:, None])[:, 0].to(torch.int64)
    inputs.positions.copy_(at)
    inputs.slot_mapping.copy_((block * block_size + at % block_size).masked_fill_(~is_open, PAD_SLOT))
    inputs.seq_lens.copy_((at + 1).masked_fill_(limits == 0, 0))
    if inputs.rope_deltas is not None and inputs.rope_positions is not None:
        inputs.rope_positions.copy_((at + inputs.rope_deltas).masked_fill_(limits == 0, 0))
