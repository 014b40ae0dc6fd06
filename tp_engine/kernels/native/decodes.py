"""Beginning and end of a decode step in C: the twins are ``kernels.decode_inputs`` and ``sampling.ranking``."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels.decode_inputs import DecodeInputs, RowTables
from tp_engine.kernels.native.layout import DTYPE_CODES


class NativeDecodes:
    """The operations of ``kernels.decode_inputs.DecodeOps``, by the functions of ``library``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._prepare, self._advance = library.prepare_decodes, library.advance_decodes

    def prepare(self, tables: RowTables, inputs: DecodeInputs) -> None:
        """See ``prepare_decodes``."""
        source, target = tables.block_table, inputs.block_table
        num_columns = source.stride(1)
        assert target.stride(1) == num_columns
        self._prepare(
            inputs.rows.data_ptr(),
            len(inputs.rows),
            tables.token_ids.data_ptr(),
            tables.token_ids.stride(0),
            tables.num_computed.data_ptr(),
            source.data_ptr(),
            len(source),
            source.stride(0),
            num_columns,
            tables.block_size,
            inputs.input_ids.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            inputs.slot_mapping.stride(0),
            inputs.seq_lens.data_ptr(),
            target.data_ptr(),
            target.stride(0),
        )

    def advance(self, tables: RowTables, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
        """See ``advance_decodes``; the lengths are those of ``inputs``, so that a second time changes nothing."""
        assert sampled.dtype == torch.int32 and sampled.is_contiguous()
        self._advance(
            inputs.rows.data_ptr(),
            inputs.seq_lens.data_ptr(),
            sampled.data_ptr(),
            len(inputs.rows),
            tables.token_ids.data_ptr(),
            tables.token_ids.stride(0),
            tables.num_computed.data_ptr(),
        )


def best_tokens(library: ctypes.CDLL, logits: torch.Tensor) -> torch.Tensor:
    """The first maximum of each row of ``logits`` (n, width), of a type of ``DTYPE_CODES``, as (n,) int32.

    A NaN is above all numbers, as for ``ranking.row_argmax``.
    """
    assert logits.stride(1) == 1
    tokens = torch.empty(len(logits), dtype=torch.int32)
    rows, width = logits.shape
    library.best_tokens(logits.data_ptr(), logits.stride(0), tokens.data_ptr(), rows, width, DTYPE_CODES[logits.dtype])
    return tokens
