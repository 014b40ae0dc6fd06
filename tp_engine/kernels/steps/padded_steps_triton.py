"""Inputs of a padded step with prompts in one launch, and the end of the step in another: ``padded_steps`` in Triton.

::

    prepare: program (i, g), in group g    i < B: request i: its length, the columns in use of its block table, and for
                                           a decode its token
                                           above: TOKENS tokens of the chunks, which find their request by comparing
                                           their indices with the ends of all R chunks
    advance: program i ends the step of requests [i * BLOCK, (i + 1) * BLOCK)
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.kernels.steps.decode_inputs_triton import (
    ADVANCE_BLOCK,
    PADDING_SLOT,
    TABLE_BLOCK,
    prepare_request,
    row_arguments,
)
from tp_engine.kernels.steps.padded_steps import PaddedInputs, PaddedRequests

_TOKEN_BLOCK = 64


@triton.jit(do_not_specialize=["slot_stride", "table_stride", "num_decodes", "num_tokens"])
@no_type_check
def prepare_steps_kernel(
    token_ids, num_computed, block_table, rows, input_ids, positions, slot_mapping, seq_lens, tables, rope_deltas,
    rope_positions, token_stride, source_stride, slot_stride, table_stride, query_start, num_decodes, num_tokens,
    NUM_CHUNKS: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HAS_DELTAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one request, or TOKENS tokens of chunks, in one group; strides go from group to group."""
    begin_program(PDL)
    program = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    num_requests = num_decodes + NUM_CHUNKS
    slots = slot_mapping + group * slot_stride
    source = block_table + group * source_stride
    if program < num_requests:
        count = tl.load(query_start + program + 1) - tl.load(query_start + program)
        prepare_request(
            token_ids, num_computed, source, rows, input_ids, positions, slots, seq_lens, tables + group * table_stride,
            rope_deltas, rope_positions, token_stride, program, count, program < num_decodes, NUM_COLUMNS, BLOCK_SIZE,
            BLOCK, HAS_DELTAS,
        )  # fmt: skip
    else:
        first = num_decodes + (program - num_requests) * TOKENS
        _chunk_tokens(
            token_ids, num_computed, source, rows + num_decodes, query_start + num_decodes, input_ids, positions, slots,
            rope_positions, token_stride, first, num_tokens, NUM_CHUNKS, NUM_COLUMNS, BLOCK_SIZE, TOKENS, HAS_DELTAS,
        )  # fmt: skip


@jit
def _chunk_tokens(
    token_ids, num_computed, block_table, rows, query_start, input_ids, positions, slots, rope_positions, token_stride,
    first, num_tokens,
    NUM_CHUNKS: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_DELTAS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens from the step's token ``first`` on; ``rows`` and ``query_start`` begin with the chunks."""
    token = first + tl.arange(0, TOKENS)
    inside = token < num_tokens
    ends = tl.load(query_start + 1 + tl.arange(0, NUM_CHUNKS))
    owner = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    is_token = inside & (owner < NUM_CHUNKS)
    row = tl.load(rows + owner, mask=is_token, other=0).to(tl.int64)
    begin = tl.load(query_start + owner, mask=is_token, other=0)
    computed = tl.load(num_computed + row, mask=is_token, other=0)
    position = tl.where(is_token, computed + token - begin, 0).to(tl.int64)
    block = tl.load(block_table + row * NUM_COLUMNS + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    token_id = tl.load(token_ids + row * token_stride + position, mask=is_token, other=0)
    tl.store(input_ids + token, token_id, mask=inside)
    tl.store(positions + token, position, mask=inside)
    if HAS_DELTAS:
        tl.store(rope_positions + token, position, mask=inside)
    tl.store(slots + token, tl.where(is_token, block * BLOCK_SIZE + position % BLOCK_SIZE, PADDING_SLOT), mask=inside)


@triton.jit(do_not_specialize=["num_requests"])
@no_type_check
def advance_steps_kernel(
    token_ids, num_computed, rows, query_start, sampled_places, sampled, token_stride, num_requests,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK requests."""
    begin_program(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_requests
    row = tl.load(rows + request, mask=is_request, other=-1).to(tl.int64)
    is_kept = row >= 0
    begin = tl.load(query_start + request, mask=is_kept, other=0)
    end = tl.load(query_start + request + 1, mask=is_kept, other=0)
    length = tl.load(num_computed + row, mask=is_kept, other=0) + end - begin
    place = tl.load(sampled_places + request, mask=is_kept, other=-1)
    is_sampled = place >= 0
    new_token = tl.load(sampled + place, mask=is_sampled, other=0)
    tl.store(token_ids + row * token_stride + length, new_token, mask=is_sampled)
    tl.store(num_computed + row, length, mask=is_kept)


def prepare_steps_triton(tables: RowTables, requests: PaddedRequests, inputs: PaddedInputs) -> None:
    """``padded_steps.prepare_steps``, which copies only the columns of the block tables that are in use."""
    num_groups, _, num_columns = tables.block_table.shape
    num_requests, num_tokens, num_decodes = len(requests.rows), len(inputs.input_ids), requests.num_decodes
    num_chunks = num_requests - num_decodes
    assert num_chunks == triton.next_power_of_2(num_chunks), f"room for {num_chunks} chunks, not a power of two"
    num_programs = num_requests + triton.cdiv(num_tokens - num_decodes, _TOKEN_BLOCK)
    prepare_steps_kernel[(num_programs, num_groups)](
        *row_arguments(tables, requests.rows, inputs), requests.query_start, num_decodes, num_tokens,
        NUM_CHUNKS=num_chunks, NUM_COLUMNS=num_columns, BLOCK_SIZE=tables.block_size, BLOCK=TABLE_BLOCK,
        TOKENS=_TOKEN_BLOCK, HAS_DELTAS=tables.rope_deltas is not None, num_warps=1,
        **dependent_launch(requests.rows.device),
    )  # fmt: skip


def advance_steps_triton(tables: RowTables, requests: PaddedRequests, sampled: torch.Tensor) -> None:
    assert sampled.dtype == torch.int32 and sampled.is_contiguous()
    num_requests = len(requests.rows)
    advance_steps_kernel[(triton.cdiv(num_requests, ADVANCE_BLOCK),)](
        tables.token_ids, tables.num_computed, requests.rows, requests.query_start, requests.sampled_places, sampled,
        tables.token_ids.stride(0), num_requests,
        BLOCK=ADVANCE_BLOCK, **dependent_launch(requests.rows.device),
    )  # fmt: skip
