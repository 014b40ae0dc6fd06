"""Inputs of a decode step, made on the device from the rows that live there, in plain PyTorch.

The twins of ``decode_inputs_triton`` and ``cpu/ops.py``.  All that a decode step needs from the host is the list of its
rows, which seldom changes::

    R rows of T tokens and M blocks          B requests, one token each; row -1 is padding
    token_ids    (R, T)    int32             rows         (B,)      int32  r                             padding:
    num_computed (R,)      int32             input_ids    (B,)      int32  token_ids[r, n]                     0
      n = num_computed[r]                    positions    (B,)      int64  n                                   0
    block_table  (G, R, M) int32             slot_mapping (G, B)    int64  table[g, r, n // size] * size
                                                                             + n % size                       -1
                                             seq_lens     (B,)      int32  n + 1                               0
                                             block_table  (G, B, M) int32  table[g, r], the columns in use
    rope_deltas  (R,)      int32             rope_positions (B,)    int64  n + rope_deltas[r]                  0

The last line is for models with M-RoPE (``RopeSpec.sections``), whose images advance the rotary position by less than
their number of tokens; for all others, rotary positions are the positions.

G groups of layers have a table each (``kv_layout``).  ``advance_decodes`` writes the sampled token to
``token_ids[r, n + 1]``, and the row then has ``n + 1`` computed tokens.
Nothing waits for the device and no shape depends on a length, so a CUDA graph can hold both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from tp_engine.plan import PAD_SLOT
from tp_engine.system.units import round_up

PAD_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """The rows' tables, contiguous, on the device; see the module's text.  ``block_size`` in tokens."""

    token_ids: torch.Tensor
    num_computed: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    rope_deltas: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensors:
    """Inputs of N tokens of B requests; see the texts of this module and of ``padded_steps``.

    Each group's part of ``slot_mapping`` and ``block_table`` is contiguous.  Columns of ``block_table`` after a
    request's last block hold old block ids.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    rope_positions: torch.Tensor | None = None

    @property
    def rotary_positions(self) -> torch.Tensor:
        """The rotary positions (N,) int64."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for field in fields(self) if (value := getattr(self, field.name)) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs(InputTensors):
    """Inputs of one step of decodes, of one token each.  ``query_start`` (B + 1,) int32 never changes."""

    rows: torch.Tensor
    query_start: torch.Tensor

    @staticmethod
    def allocate(max_requests: int, tables: RowTables) -> DecodeInputs:
        """Room for ``max_requests``, or a few more with several groups (``padded_room``); all are padding."""
        device, room = tables.block_table.device, padded_room(max_requests, len(tables.block_table))
        starts = torch.arange(room + 1, dtype=torch.int32, device="cpu")  # on the meta device this would import sympy
        return DecodeInputs(
            rows=torch.full((room,), PAD_ROW, dtype=torch.int32, device=device),
            query_start=starts.to(device),
            **empty_inputs(room, room, tables),
        )

    def first(self, num_requests: int) -> DecodeInputs:
        """The first ``num_requests``, in the same memory."""
        starts, inputs = self.query_start[: num_requests + 1], first_inputs(self, num_requests, num_requests)
        return DecodeInputs(rows=self.rows[:num_requests], query_start=starts, **inputs)


def empty_inputs(num_tokens: int, num_requests: int, tables: RowTables) -> dict[str, Any]:
    """The fields of ``InputTensors`` for that many tokens and requests, all padding."""
    device, (num_groups, _, num_columns) = tables.block_table.device, tables.block_table.shape
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return {
        "input_ids": torch.zeros(num_tokens, dtype=torch.int32, device=device),
        "positions": positions,
        "slot_mapping": torch.full((num_groups, num_tokens), PAD_SLOT, dtype=torch.int64, device=device),
        "seq_lens": torch.zeros(num_requests, dtype=torch.int32, device=device),
        "block_table": torch.zeros((num_groups, num_requests, num_columns), dtype=torch.int32, device=device),
        "rope_positions": None if tables.rope_deltas is None else torch.zeros_like(positions),
    }


def first_inputs(inputs: InputTensors, num_tokens: int, num_requests: int) -> dict[str, Any]:
    """The fields of ``InputTensors`` for the first tokens and requests of ``inputs``, in the same memory."""
    return {
        "input_ids": inputs.input_ids[:num_tokens],
        "positions": inputs.positions[:num_tokens],
        "slot_mapping": inputs.slot_mapping[:, :num_tokens],
        "seq_lens": inputs.seq_lens[:num_requests],
        "block_table": inputs.block_table[:, :num_requests],
        "rope_positions": None if inputs.rope_positions is None else inputs.rope_positions[:num_tokens],
    }


def padded_room(count: int, num_groups: int) -> int:
    """Room for ``count`` entries of each of ``num_groups`` consecutive groups in one tensor.

    Each group begins at a multiple of 16 bytes, because Triton would compile another kernel for other addresses.
    """
    return count if num_groups == 1 else round_up(count, 4)


def prepare_decodes(tables: RowTables, inputs: DecodeInputs) -> None:
    """Fill ``inputs`` for its ``rows``."""
    is_padding = inputs.rows < 0
    rows = inputs.rows.clamp(min=0).to(torch.int64)
    computed = tables.num_computed.index_select(0, rows).to(torch.int64)
    block = tables.block_table[:, rows, computed // tables.block_size].to(torch.int64)
    slots = block * tables.block_size + computed % tables.block_size
    inputs.input_ids.copy_(tables.token_ids[rows, computed].masked_fill_(is_padding, 0))
    inputs.positions.copy_(computed.masked_fill(is_padding, 0))
    inputs.slot_mapping.copy_(slots.masked_fill_(is_padding, PAD_SLOT))
    inputs.seq_lens.copy_((computed + 1).masked_fill_(is_padding, 0))
    inputs.block_table.copy_(tables.block_table.index_select(1, rows))
    if inputs.rope_positions is not None and tables.rope_deltas is not None:
        turns = computed + tables.rope_deltas.index_select(0, rows)
        inputs.rope_positions.copy_(turns.masked_fill_(is_padding, 0))


def advance_decodes(tables: RowTables, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    """End a step: the tokens of ``inputs`` count as computed, and ``sampled`` (B,) int32 follow; padding is skipped."""
    rows = inputs.rows
    is_kept = rows >= 0
    places = rows.clamp(min=0).to(torch.int64)
    columns = (tables.num_computed.index_select(0, places) + 1).clamp_(max=tables.token_ids.shape[1] - 1)
    flat = tables.token_ids.view(-1)
    flat_places = places * tables.token_ids.shape[1] + columns
    # Padding adds 0 to row 0: leaving it out would need a shape that only the device knows.
    flat.index_add_(0, flat_places, (sampled - flat.index_select(0, flat_places)) * is_kept)
    tables.num_computed.index_add_(0, places, is_kept.to(torch.int32))
