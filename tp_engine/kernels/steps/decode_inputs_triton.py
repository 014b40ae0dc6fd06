"""Inputs of a decode step in one launch, and the end of the step in another: the Triton twin of ``decode_inputs``.

A sampler of one launch ends the step itself, through ``advance_rows`` (``sampling/best_triton.py``).

::

    prepare: program (b, g) gathers request b, and copies the columns in use of its block table of group g, BLOCK at
             a time
    advance: program i ends the step of requests [i * BLOCK, (i + 1) * BLOCK)
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, InputTensors, RowTables
from tp_engine.plan import PAD_SLOT

TABLE_BLOCK = 256
ADVANCE_BLOCK = 128
PADDING_SLOT = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["slot_stride"])
@no_type_check
def prepare_decodes_kernel(
    token_ids, num_computed, block_table, rows, input_ids, positions, slot_mapping, seq_lens, tables, rope_deltas,
    rope_positions, token_stride, source_stride, slot_stride, table_stride,
    NUM_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one request, in one group; the last three strides go from group to group."""
    begin_program(PDL)
    request, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    prepare_request(
        token_ids, num_computed, block_table + group * source_stride, rows, input_ids, positions,
        slot_mapping + group * slot_stride, seq_lens, tables + group * table_stride, rope_deltas, rope_positions,
        token_stride, request, 1, True, NUM_COLUMNS, BLOCK_SIZE, BLOCK, HAS_DELTAS,
    )  # fmt: skip


@jit
def prepare_request(
    token_ids, num_computed, block_table, rows, input_ids, positions, slots, seq_lens, tables, rope_deltas,
    rope_positions, token_stride, request, count, is_decode,
    NUM_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTAS: tl.constexpr,
):  # fmt: skip
    """Store the length and the block table of ``request``, of ``count`` tokens, and for a decode its token, position
    and slot; tables and slots are the group's."""
    row = tl.load(rows + request).to(tl.int64)
    is_row = row >= 0
    own_table = block_table + row * NUM_COLUMNS
    length = tl.where(is_row, tl.load(num_computed + row, mask=is_row, other=0) + count, 0)
    tl.store(seq_lens + request, length)
    target = tables + request.to(tl.int64) * NUM_COLUMNS
    copy_table(own_table, target, (length + BLOCK_SIZE - 1) // BLOCK_SIZE, BLOCK)
    if is_decode:
        position = tl.maximum(length - 1, 0).to(tl.int64)
        block = tl.load(own_table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
        token_id = tl.load(token_ids + row * token_stride + position, mask=is_row, other=0)
        tl.store(input_ids + request, token_id)
        tl.store(positions + request, position)
        if HAS_DELTAS:
            tl.store(rope_positions + request, position + tl.load(rope_deltas + row, mask=is_row, other=0))
        tl.store(slots + request, tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, PADDING_SLOT))


@jit
def copy_table(own_table, target, num_used, BLOCK: tl.constexpr):
    """Copy the first ``num_used`` columns of a row's block table to its request's."""
    for start in range(0, num_used, BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_use = column < num_used
        tl.store(target + column, tl.load(own_table + column, mask=in_use), mask=in_use)


@triton.jit(do_not_specialize=["num_requests"])
@no_type_check
def advance_decodes_kernel(
    token_ids, num_computed, rows, sampled, token_stride, num_requests, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program: up to BLOCK requests."""
    begin_program(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + request, mask=request < num_requests, other=-1).to(tl.int64)
    advance_rows(token_ids, num_computed, token_stride, row, tl.load(sampled + request, mask=row >= 0, other=0))


@jit
def advance_rows(token_ids, num_computed, token_stride, row, new_token):
    """Append ``new_token`` to ``row`` (int64), a scalar or a block each, and count one more computed token.

    A negative row is padding and changes nothing.
    """
    is_kept = row >= 0
    computed = tl.load(num_computed + row, mask=is_kept, other=0) + 1
    tl.store(token_ids + row * token_stride + computed, new_token, mask=is_kept)
    tl.store(num_computed + row, computed, mask=is_kept)


def prepare_decodes_triton(tables: RowTables, inputs: DecodeInputs) -> None:
    """``decode_inputs.prepare_decodes``, which copies only the columns of the block tables that are in use."""
    num_groups, _, num_columns = tables.block_table.shape
    prepare_decodes_kernel[(len(inputs.rows), num_groups)](
        *row_arguments(tables, inputs.rows, inputs),
        NUM_COLUMNS=num_columns, BLOCK_SIZE=tables.block_size, BLOCK=TABLE_BLOCK,
        HAS_DELTAS=tables.rope_deltas is not None, num_warps=1, **dependent_launch(inputs.rows.device),
    )  # fmt: skip


def row_arguments(tables: RowTables, rows: torch.Tensor, inputs: InputTensors) -> tuple[Any, ...]:
    """The arguments of kernels that fill ``inputs``, up to the strides."""
    assert tables.block_table.is_contiguous()
    assert inputs.block_table.stride()[1:] == (tables.block_table.shape[2], 1)
    assert tables.token_ids.stride(1) == inputs.slot_mapping.stride(1) == 1
    given = tables.token_ids, tables.num_computed, tables.block_table, rows
    filled = inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, inputs.block_table
    strided = tables.token_ids, tables.block_table, inputs.slot_mapping, inputs.block_table
    deltas = tables.num_computed if tables.rope_deltas is None else tables.rope_deltas  # not read, if there are none
    return *given, *filled, deltas, inputs.rotary_positions, *(one.stride(0) for one in strided)


def advance_decodes_triton(tables: RowTables, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    rows = inputs.rows
    assert rows.dtype == sampled.dtype == torch.int32 and rows.is_contiguous() and sampled.is_contiguous()
    advance_decodes_kernel[(triton.cdiv(len(rows), ADVANCE_BLOCK),)](
        tables.token_ids, tables.num_computed, rows, sampled, tables.token_ids.stride(0), len(rows),
        BLOCK=ADVANCE_BLOCK, **dependent_launch(rows.device),
    )  # fmt: skip
