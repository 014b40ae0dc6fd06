"""Decode steps whose inputs the device makes from its rows: the host says which rows, when they change."""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.decode_inputs import PAD_ROW, DecodeInputs, RowTables, decode_ops
from tp_engine.layers.upload import upload
from tp_engine.plan import NO_IDS, IntArray


class DecodeBatch:
    """Inputs of decode steps of up to ``max_requests`` rows of ``tables``, always at the same place.

    ``set_rows`` is the host's part of a step.  ``prepare`` and ``advance`` are the device's: what they launch depends
    on ``size`` alone, so a CUDA graph may hold them and what lies between.
    """

    def __init__(self, tables: RowTables, max_requests: int) -> None:
        self._tables = tables
        self._ops = decode_ops(tables.token_ids.device.type)
        self._inputs = DecodeInputs.allocate(max_requests, tables)
        self._inputs_of_size: dict[int, DecodeInputs] = {}
        self._ones: IntArray = np.ones(max_requests, dtype=np.int32)
        self._rows: IntArray = np.full(max_requests, PAD_ROW, dtype=np.int32)
        self._given: tuple[IntArray, int] = (NO_IDS, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs."""
        return self._inputs.num_bytes

    def set_rows(self, rows: IntArray, size: int) -> None:
        """The next step is of ``rows`` (n,), which are not changed later, padded to ``size`` requests."""
        if rows is self._given[0] and size == self._given[1]:
            return
        self._given = rows, size
        if len(rows) == size and np.array_equal(rows, self._rows[:size]):
            return
        wanted: IntArray = np.full(size, PAD_ROW, dtype=np.int32)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._rows[:size]):
            self._inputs.rows[:size].copy_(upload(wanted, self._inputs.rows.device), non_blocking=True)
            self._rows[:size] = wanted

    def prepare(self, size: int) -> DecodeInputs:
        """Make the inputs of a step of ``size`` requests."""
        inputs = self.inputs(size)
        self._ops.prepare(self._tables, inputs)
        return inputs

    def inputs(self, size: int) -> DecodeInputs:
        """Where the inputs of a step of ``size`` requests are."""
        inputs = self._inputs_of_size.get(size)
        if inputs is None:
            inputs = self._inputs_of_size[size] = self._inputs.first(size)
        return inputs

    def advance(self, size: int, sampled: torch.Tensor) -> None:
        """Each row has one more computed token, and ``sampled`` (size,) int32 follow."""
        self._ops.advance(self._tables, self.inputs(size), sampled)

    def recorded_seq_lens(self, inputs: DecodeInputs) -> IntArray:
        """The lengths as the host knows them while a step is recorded: zeros; on a CPU they are the device's own."""
        if inputs.seq_lens.device.type == "cpu":
            lengths: IntArray = inputs.seq_lens.numpy()
            return lengths
        return np.zeros(len(inputs.seq_lens), dtype=np.int32)

    def metadata(self, inputs: DecodeInputs, host_seq_lens: IntArray) -> AttentionMetadata:
        """What attention sees of ``inputs``; ``host_seq_lens`` (size,) int32 are 0 for padding."""
        size = len(host_seq_lens)
        return AttentionMetadata(
            num_decodes=size,
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            seq_lens=inputs.seq_lens,
            query_start=inputs.query_start,
            host_query_lens=self._ones[:size],
            host_seq_lens=host_seq_lens,
            is_padded=bool(size and host_seq_lens.min() == 0),
        )
