"""What the scheduler shows: its statistics, the pool as a grid, the running sequences with their block tables.

A view is bounded, whatever the size of the pool and the batch, and costs nothing until it is asked for::

    cell    state                          byte i of ``cells``:   bits 0-1   cell 4 i
    0       free                                                  bits 2-3   cell 4 i + 1
    1       cached: only a prefix is kept                         bits 4-5   cell 4 i + 2
    2       used by one row                                       bits 6-7   cell 4 i + 3
    3       shared by several rows
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence
from tp_engine.system.units import ceil_div

_MAX_ID = 24
_CELLS_PER_BYTE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot.  ``num_live_tokens`` have K/V in used blocks, and count in each group of layers that holds them;
    ``fragmentation`` is 1 - live tokens / (used blocks * block size), 0 when nothing is used.

    ``extensions`` has what features count, by feature.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_live_tokens: int
    fragmentation: float
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_preempted_answers: int = 0
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that running requests hold, 0 to 1."""
        return self.num_used_blocks / max(1, self.num_free_blocks + self.num_cached_blocks + self.num_used_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLimits:
    """How much a view may hold: cells of the grid, sequences, and blocks of each one's table."""

    max_cells: int = 16384
    max_sequences: int = 64
    max_blocks: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGrid:
    """States of all blocks in the order of their ids, two bits each, as drawn above; ``num_cells`` of them count.  A
    cell stands for ``blocks_per_cell`` neighbouring blocks and has the highest of their states."""

    num_blocks: int
    blocks_per_cell: int
    num_cells: int
    cells: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A sequence with a row.  ``request_id`` is cut short; ``blocks`` are the first of the ``num_blocks`` that it holds
    in the first group of layers, which keeps all if any group does.

    ``phase`` is ``prefill``, ``decode`` or ``ending``; ``num_computed_tokens`` have K/V, ``num_cached_tokens`` of the
    prompt came from the prefix cache.  ``arrival_s`` is time.monotonic().
    """

    request_id: str
    index: int
    phase: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_s: float
    num_blocks: int
    num_shared_blocks: int
    blocks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """``running`` are the first sequences by row; ``num_omitted`` more have one."""

    grid: PoolGrid
    running: list[RunningSequence]
    num_omitted: int


def stats_of(state: SchedulerState, of_features: Mapping[str, Any]) -> SchedulerStats:
    """Return the statistics of ``state``, which is not changed, and those ``of_features``."""
    blocks = state.blocks
    held_slots = blocks.pool.num_used * blocks.block_size
    num_live = state.rows.num_live_tokens(blocks.pool.num_used, blocks.block_size)
    return SchedulerStats(
        num_running=state.rows.num_running,
        num_waiting=state.num_waiting,
        num_free_blocks=blocks.pool.num_free,
        num_cached_blocks=blocks.pool.num_cached,
        num_used_blocks=blocks.pool.num_used,
        num_live_tokens=num_live,
        fragmentation=1 - num_live / held_slots if held_slots else 0.0,
        **asdict(state.counters),
        extensions=dict(of_features),
    )


def view_scheduler(state: SchedulerState, limits: ViewLimits) -> SchedulerView:
    """Return the view of ``state``, which is not changed."""
    holders = state.blocks.pool.ref_counts
    states = np.minimum(holders, 2).astype(np.uint8)
    states += states > 0
    states[(states == 0) & state.blocks.pool.contents()] = 1
    running = state.rows.running()
    shown = running[: limits.max_sequences]
    return SchedulerView(
        grid=_grid(states, limits.max_cells),
        running=[_running(sequence, state.rows, holders, limits.max_blocks) for sequence in shown],
        num_omitted=len(running) - len(shown),
    )


def _grid(states: npt.NDArray[np.uint8], max_cells: int) -> PoolGrid:
    num_blocks = len(states)
    blocks_per_cell = ceil_div(num_blocks, max_cells)
    num_cells = ceil_div(num_blocks, blocks_per_cell)
    padded = np.zeros(ceil_div(num_cells, _CELLS_PER_BYTE) * _CELLS_PER_BYTE * blocks_per_cell, dtype=np.uint8)
    padded[:num_blocks] = states
    cells = np.maximum.reduceat(padded, np.arange(0, len(padded), blocks_per_cell)).reshape(-1, _CELLS_PER_BYTE)
    packed = cells[:, 0] | cells[:, 1] << 2 | cells[:, 2] << 4 | cells[:, 3] << 6
    return PoolGrid(num_blocks=num_blocks, blocks_per_cell=blocks_per_cell, num_cells=num_cells, cells=packed.tobytes())


def _running(
    sequence: Sequence, rows: RunningBatch, holders: npt.NDArray[np.int64], max_blocks: int
) -> RunningSequence:
    row, request = sequence.row, sequence.group.request
    table = rows.tables(row)[rows.first_block[row, 0] :, 0]
    return RunningSequence(
        request_id=shorten(request.request_id),
        index=sequence.index,
        phase=sequence.phase.name.lower(),
        priority=request.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=int(rows.num_tokens[row]) - sequence.num_prompt_tokens,
        num_computed_tokens=int(rows.num_computed[row]),
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        arrival_s=request.arrival_s,
        num_blocks=len(table),
        num_shared_blocks=int((holders[table] > 1).sum()),
        blocks=table[:max_blocks].tolist(),
    )


def shorten(request_id: str) -> str:
    """At most 24 characters of it, the end cut off."""
    return request_id if len(request_id) <= _MAX_ID else request_id[: _MAX_ID - 1] + "…"
