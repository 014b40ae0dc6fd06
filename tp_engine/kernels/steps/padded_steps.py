"""Inputs of a padded step with prompts, made on the device, and the end of such a step, in plain PyTorch.

The twin of ``padded_steps_triton``.  A step has room for D decodes, then for R chunks of prompts with T tokens in all;
its shapes depend on D and T, not on what is in it::

    requests, B = D + R   | decodes | padding | chunks | padding |        tokens, N = D + T, with as many for each
    query_start           0 1 2 ... D         D, where chunks end, then the last end repeated

The host says which rows there are (``PaddedRequests``), in one small upload.  From that and the rows' tables follow,
with ``t`` a token's index in its request and ``n = num_computed[r]`` for its row ``r``::

    input_ids    (N,)      int32  token_ids[r, n + t]                                           padding:  0
    positions    (N,)      int64  n + t                                                                   0
    slot_mapping (G, N)    int64  table[g, r, (n + t) // size] * size + (n + t) % size                   -1
    seq_lens     (B,)      int32  n + the request's tokens                                                0
    block_table  (G, B, M) int32  table[g, r], the columns in use
    rope_positions (N,)    int64  decodes: n + rope_deltas[r]; prompts: the positions                     0

The last is for models with M-RoPE; prompts with images are in no such step.

``advance_steps`` ends the step: each request's tokens count as computed, and its sampled token, if any, follows them.
``decode_inputs`` does the same for steps of decodes alone, whose rows seldom change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp_engine.kernels.steps.decode_inputs import InputTensors, RowTables, empty_inputs, first_inputs, padded_room
from tp_engine.plan import PAD_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRequests:
    """What the host says of the B requests of a step, all int32; at most B tokens are sampled.

    ``rows`` (B,), -1 for padding.  ``wanted`` (B,): the indices, among the step's tokens, of those whose next token is
    sampled, in batch order, then 0; ``sampled_rows`` (B,): their rows, then -1.  ``sampled_places`` (B,): each
    request's index in these two, -1 if none is sampled for it.  ``query_start`` (B + 1,): where each request's tokens
    begin; one token for each of the first ``num_decodes``, padding included, none for padding after the chunks.
    """

    num_decodes: int
    rows: torch.Tensor
    wanted: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_places: torch.Tensor
    query_start: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedInputs(InputTensors):
    """Inputs of one step; see the module's text."""

    @staticmethod
    def allocate(max_tokens: int, max_requests: int, tables: RowTables) -> PaddedInputs:
        """Room for a step, or a little more with several groups (``padded_room``)."""
        tokens, requests = (padded_room(count, len(tables.block_table)) for count in (max_tokens, max_requests))
        return PaddedInputs(**empty_inputs(tokens, requests, tables))

    def first(self, num_tokens: int, num_requests: int) -> PaddedInputs:
        """The inputs of a smaller step, in the same memory."""
        return PaddedInputs(**first_inputs(self, num_tokens, num_requests))


def prepare_steps(tables: RowTables, requests: PaddedRequests, inputs: PaddedInputs) -> None:
    """Fill ``inputs`` for ``requests``."""
    rows, starts = requests.rows, requests.query_start
    tokens = torch.arange(len(inputs.input_ids), device=rows.device, dtype=torch.int64)
    owners = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(rows) - 1)
    is_padding = (rows[owners] < 0) | (tokens >= starts[owners + 1])
    computed = tables.num_computed[rows.clamp(min=0)]
    positions = (computed[owners] + tokens - starts[owners]).masked_fill_(is_padding, 0)
    row_of_token = rows[owners].clamp(min=0)
    block = tables.block_table[:, row_of_token, positions // tables.block_size].to(torch.int64)
    slots = block * tables.block_size + positions % tables.block_size
    inputs.input_ids.copy_(tables.token_ids[row_of_token, positions].masked_fill_(is_padding, 0))
    inputs.positions.copy_(positions)
    inputs.slot_mapping.copy_(slots.masked_fill_(is_padding, PAD_SLOT))
    inputs.seq_lens.copy_((computed + starts.diff()).masked_fill_(rows < 0, 0))
    inputs.block_table.copy_(tables.block_table.index_select(1, rows.clamp(min=0)))
    if inputs.rope_positions is not None and tables.rope_deltas is not None:
        is_decode = ~is_padding & (tokens < requests.num_decodes)
        inputs.rope_positions.copy_(positions + tables.rope_deltas[row_of_token] * is_decode)


def advance_steps(tables: RowTables, requests: PaddedRequests, sampled: torch.Tensor) -> None:
    """End a step whose sampled token ids are ``sampled`` (n,) int32, possibly followed by padding."""
    kept = requests.rows >= 0
    rows = requests.rows[kept].to(torch.int64)
    lengths = tables.num_computed[rows] + requests.query_start.diff()[kept]
    tables.num_computed[rows] = lengths
    places = requests.sampled_places[kept].to(torch.int64)
    ends = places >= 0
    tables.token_ids[rows[ends], lengths[ends].to(torch.int64)] = sampled[places[ends]]
