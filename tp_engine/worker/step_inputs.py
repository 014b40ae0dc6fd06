"""The inputs of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.plan import IntArray
from tp_engine.worker.batch_layout import BatchLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one forward pass over N tokens, of which n are followed by a sampled one.

    On the device: ``input_ids`` (N,) int32, ``positions`` (N,) int64; ``prefill_places`` (p,) int64, where the new ids
    of sampled prefills go in the flattened token table, None where no prefill is sampled.  On the host:
    ``sampled_positions`` (n,), the new tokens' positions.  ``attention`` has one entry per group of layers.
    """

    layout: BatchLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionMetadata, ...]
    sampled_positions: IntArray
    prefill_places: torch.Tensor | None = None
