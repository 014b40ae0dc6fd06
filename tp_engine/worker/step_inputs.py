"""The inputs of one forward pass: those of its decodes, then those of its prefills."""

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
    ``sampled_positions`` (n,), the new tokens' positions.
    """

    layout: BatchLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    sampled_positions: IntArray
    prefill_places: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPart:
    """The inputs of some requests of a step, T tokens of B requests, on the device.

    ``input_ids`` (T,) int32, ``positions`` and ``slot_mapping`` (T,) int64, ``seq_lens`` (B,) int32, ``block_table``
    (B, M) int32.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    def then(self, other: InputPart) -> InputPart:
        """These requests, then the ``other``s."""
        return InputPart(
            input_ids=torch.cat((self.input_ids, other.input_ids)),
            positions=torch.cat((self.positions, other.positions)),
            slot_mapping=torch.cat((self.slot_mapping, other.slot_mapping)),
            seq_lens=torch.cat((self.seq_lens, other.seq_lens)),
            block_table=torch.cat((self.block_table, other.block_table)),
        )
