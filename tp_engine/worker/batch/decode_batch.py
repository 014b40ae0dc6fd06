"""Inputs of decodes, which the device makes from its tables; the host sends the rows when they change."""

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.ops import op
from tp_engine.kernels.steps.decode_inputs import PAD_ROW, DecodeInputs, RowTables
from tp_engine.layers.upload import upload_into
from tp_engine.plan import NO_IDS, IntArray, StepPlan

GroupViews: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Each group's ``slot_mapping`` (B,) and ``block_table`` (B, M)."""


class DecodeBatch:
    """Inputs of decodes of up to ``max_requests`` rows of ``tables``, at a fixed place for steps that only decode.

    ``set_rows`` is the host's part of a step, ``prepare`` and ``advance`` are the device's: their launches depend only
    on ``size``, so a CUDA graph may hold them and what lies between.

    Rows from ``first_spare`` on are spare ones.  If it is given, layers are told which of them go on after which row:
    those of a step stand for the ``base_rows`` (n,), grouped.
    """

    def __init__(self, tables: RowTables, max_requests: int, *, first_spare: int | None = None) -> None:
        self.tables = tables
        device_type = tables.token_ids.device.type
        self._prepare, self._advance = op("prepare_decodes", device_type), op("advance_decodes", device_type)
        self._inputs = DecodeInputs.allocate(max_requests, tables)
        self._inputs_of_size: dict[int, DecodeInputs] = {}
        self._groups_of_size: dict[int, GroupViews] = {}
        self._ones: IntArray = np.ones(max_requests, dtype=np.int32)
        self._rows: IntArray = np.full(max_requests, PAD_ROW, dtype=np.int32)
        self._given = (0, 0)  # epoch and size
        self.base_rows: IntArray = NO_IDS
        self._first_spare = first_spare
        self._host_runs: IntArray = np.zeros((max_requests, 2), dtype=np.int32)
        device = tables.token_ids.device
        self._runs = None if first_spare is None else torch.zeros((max_requests, 2), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self._inputs.num_bytes + (0 if self._runs is None else self._runs.nbytes)

    def set_rows(self, plan: StepPlan, size: int) -> None:
        """Take the decodes of ``plan``, padded to ``size`` requests, for the next step."""
        rows, epoch = plan.decode_rows, plan.rows_epoch
        if epoch and self._given == (epoch, size):
            return
        self._given = epoch, size
        if self._runs is not None and self._first_spare is not None:
            num_spare = np.count_nonzero(rows >= self._first_spare)  # 0 while steps are recorded
            runs = draft_runs(rows, self.base_rows[:num_spare], size)
            if not np.array_equal(runs, self._host_runs[:size]):
                upload_into(self._runs[:size], runs)
                self._host_runs[:size] = runs
        if len(rows) == size and np.array_equal(rows, self._rows[:size]):
            return
        wanted: IntArray = np.full(size, PAD_ROW, dtype=np.int32)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._rows[:size]):
            upload_into(self._inputs.rows[:size], wanted)
            self._rows[:size] = wanted

    def draft_runs(self, size: int) -> torch.Tensor | None:
        """Return ``AttentionMetadata.draft_runs`` of a step of ``size`` decodes."""
        return None if self._runs is None else self._runs[:size]

    def prepare(self, size: int) -> DecodeInputs:
        """Make the inputs of a step of ``size`` requests."""
        inputs = self.inputs(size)
        self._prepare(self.tables, inputs)
        return inputs

    def prepare_elsewhere(self, plan: StepPlan, **tokens: Any) -> None:
        """Make the inputs of the decodes of ``plan``, but for the fields ``tokens`` of ``DecodeInputs``, which are
        written to these tensors instead."""
        size = len(plan.decode_rows)
        self.set_rows(plan, size)
        self._prepare(self.tables, replace(self.inputs(size), **tokens))

    def inputs(self, size: int) -> DecodeInputs:
        """Return where the inputs of a step of ``size`` requests are."""
        inputs = self._inputs_of_size.get(size)
        if inputs is None:
            assert size <= len(self._rows), f"a step of {size} requests; there is room for {len(self._rows)}"
            inputs = self._inputs_of_size[size] = self._inputs.first(size)
        return inputs

    def advance(self, size: int, sampled: torch.Tensor) -> None:
        """Count one more computed token in each row, which ``sampled`` (size,) int32 follow."""
        self._advance(self.tables, self.inputs(size), sampled)

    def recorded_seq_lens(self, inputs: DecodeInputs) -> IntArray:
        """Return the host's lengths while a step is recorded: on a CPU the device's own, else zeros."""
        if inputs.seq_lens.device.type == "cpu":
            lengths: IntArray = inputs.seq_lens.numpy()
            return lengths
        return np.zeros(len(inputs.seq_lens), dtype=np.int32)

    def groups(self, size: int) -> GroupViews:
        """Return the groups' parts of ``inputs(size)``."""
        views = self._groups_of_size.get(size)
        if views is None:
            inputs = self.inputs(size)
            views = tuple(zip(inputs.slot_mapping.unbind(), inputs.block_table.unbind(), strict=True))
            self._groups_of_size[size] = views
        return views

    def metadata(self, inputs: DecodeInputs, host_seq_lens: IntArray) -> tuple[AttentionMetadata, ...]:
        """Return each group's metadata for ``inputs``; ``host_seq_lens`` (size,) int32 are 0 for padding."""
        size = len(host_seq_lens)
        is_padded = bool(size and host_seq_lens.min() == 0)
        return tuple(
            AttentionMetadata(
                num_decodes=size,
                slot_mapping=slot_mapping,
                block_table=block_table,
                seq_lens=inputs.seq_lens,
                query_start=inputs.query_start,
                host_query_lens=self._ones[:size],
                host_seq_lens=host_seq_lens,
                is_padded=is_padded,
                decode_rows=inputs.rows,
                draft_runs=self.draft_runs(size),
            )
            for slot_mapping, block_table in self.groups(size)
        )


def draft_runs(decode_rows: IntArray, bases: IntArray, size: int) -> IntArray:
    """Return for each of ``decode_rows``, padded to ``size``, of which the last stand for ``bases``, the place of its
    first spare row and their number (size, 2); (0, -1) for a spare row."""
    runs: IntArray = np.zeros((size, 2), dtype=np.int32)
    if len(bases):
        end = len(decode_rows)
        num_own = end - len(bases)
        runs[num_own:end, 1] = -1
        firsts = np.flatnonzero(np.diff(bases, prepend=-1))
        own = decode_rows[:num_own]
        order = own.argsort()
        owners = order[np.searchsorted(own, bases[firsts], sorter=order)]
        runs[owners] = np.stack((num_own + firsts, np.diff(firsts, append=len(bases))), 1)
    return runs
