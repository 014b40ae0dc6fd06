"""Inputs of a decode step in one launch, and the end of the step in another: the Triton twin of ``decode_inputs``.

A sampler of one launch ends the step itself, by ``advance_rows`` (``sampling/best_triton.py``).

::

    prepare: program (b, g) gathers request b, and copies the columns in use of its block table of group g, BLOCK at
             a time
    advance: program i ends the step of requests [i * BLOCK, (i + 1) * BLOCK)
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.jit import jit
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables
from tp_engine.plan import PAD_SLOT

_TABLE_BLOCK = 256
_ADVANCE_BLOCK = 128
_PAD_SLOT = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["slot_stride"])
@no_type_check
def prepare_decodes_kernel(
    token_ids,
    num_computed,
    block_table,
    rows,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    tables,
    token_stride,
    source_stride,
    slot_stride,
    table_stride,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one request, in one group; the last three strides go from group to group."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    slot = slot_mapping + group * slot_stride + request
    row = tl.load(rows + request).to(tl.int64)
    if row < 0:
        tl.store(input_ids + request, 0)
        tl.store(positions + request, 0)
        tl.store(slot, _PAD_SLOT)
        tl.store(seq_lens + request, 0)
    else:
        computed = tl.load(num_computed + row)
        own_table = block_table + group * source_stride + row * NUM_COLUMNS
        last_block = tl.load(own_table + computed // BLOCK_SIZE).to(tl.int64)
        tl.store(input_ids + request, tl.load(token_ids + row * token_stride + computed))
        tl.store(positions + request, computed.to(tl.int64))
        tl.store(slot, last_block * BLOCK_SIZE + computed % BLOCK_SIZE)
        tl.store(seq_lens + request, computed + 1)
        target = tables + group * table_stride + request.to(tl.int64) * NUM_COLUMNS
        copy_table(own_table, target, computed // BLOCK_SIZE + 1, BLOCK)


@jit
def copy_table(own_table, target, num_used, BLOCK: tl.constexpr):
    """The first ``num_used`` columns of a row's block table, for its request."""
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
    let_next_begin(PDL)
    wait_for_previous(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + request, mask=request < num_requests, other=-1).to(tl.int64)
    advance_rows(token_ids, num_computed, token_stride, row, tl.load(sampled + request, mask=row >= 0, other=0))


@jit
def advance_rows(token_ids, num_computed, token_stride, row, new_token):
    """``new_token`` follows in ``row`` (int64), a scalar or a block of them, and each has one more computed token.

    A negative row is padding and changes nothing.
    """
    is_kept = row >= 0
    computed = tl.load(num_computed + row, mask=is_kept, other=0) + 1
    tl.store(token_ids + row * token_stride + computed, new_token, mask=is_kept)
    tl.store(num_computed + row, computed, mask=is_kept)


def prepare_decodes_triton(tables: RowTables, inputs: DecodeInputs) -> None:
    """``decode_inputs.prepare_decodes``, which copies only the columns of the block tables that are in use."""
    num_groups, _, num_columns = tables.block_table.shape
    assert tables.block_table.is_contiguous() and inputs.block_table.stride()[1:] == (num_columns, 1)
    assert tables.token_ids.stride(1) == inputs.slot_mapping.stride(1) == 1
    prepare_decodes_kernel[(len(inputs.rows), num_groups)](
        tables.token_ids,
        tables.num_computed,
        tables.block_table,
        inputs.rows,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        inputs.block_table,
        tables.token_ids.stride(0),
        tables.block_table.stride(0),
        inputs.slot_mapping.stride(0),
        inputs.block_table.stride(0),
        NUM_COLUMNS=num_columns,
        BLOCK_SIZE=tables.block_size,
        BLOCK=_TABLE_BLOCK,
        num_warps=1,
        **dependent_launch(inputs.rows.device),
    )


def advance_decodes_triton(tables: RowTables, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    """``decode_inputs.advance_decodes``."""
    rows = inputs.rows
    assert rows.dtype == sampled.dtype == torch.int32 and rows.is_contiguous() and sampled.is_contiguous()
    advance_decodes_kernel[(triton.cdiv(len(rows), _ADVANCE_BLOCK),)](
        tables.token_ids,
        tables.num_computed,
        rows,
        sampled,
        tables.token_ids.stride(0),
        len(rows),
        BLOCK=_ADVANCE_BLOCK,
        **dependent_launch(rows.device),
    )
