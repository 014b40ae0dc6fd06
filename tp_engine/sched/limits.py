"""The sizes that the scheduler must stay within."""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tp_engine.model_config.kv_layout import TILE_TOKENS
from tp_engine.sched.blocks.kv_windows import KvWindows
from tp_engine.system.units import ceil_div

_CHUNKS_PER_POOL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of the pool and of a step.

    ``max_num_seqs`` rows exist in the batch; a step computes at most ``max_num_batched_tokens`` tokens; a sequence has
    at most ``max_model_len`` tokens, prompt included.  ``seed`` derives the seeds of requests that bring none.

    ``windows`` has an entry for each group of layers (``KvLayout.windows``): a sequence needs a block of the pool in
    each of them for every ``block_size`` tokens.  Kernels may read from the start of the tile of ``tile_tokens`` on
    that the first visible key is in.

    ``num_spare_rows``: rows after those of the batch, each of which may stand for one of these at a later position of
    the same step.

    ``has_states``: each row has a recurrent state too, that after the row's last computed token; so has each spare
    row.  ``num_snapshots`` more can be kept for the prefix cache.

    ``least_chunk_tokens`` may have to be computed in one step: those of an image that no chunk cuts.
    ``extensions`` has the sizes of features.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    seed: int = 0
    windows: tuple[int | None, ...] = (None,)
    tile_tokens: int = TILE_TOKENS
    num_spare_rows: int = 0
    has_states: bool = False
    num_snapshots: int = 0
    least_chunk_tokens: int = 1
    extensions: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            assert getattr(self, name) >= 1, f"{name} is {getattr(self, name)}"
        assert self.windows and all(window is None or window >= 1 for window in self.windows), self.windows

    @property
    def num_groups(self) -> int:
        """Blocks of the pool that make a logical block."""
        return len(self.windows)

    @property
    def max_step_decodes(self) -> int:
        """Most rows that a step samples: those of all sequences, or of fewer with spare rows."""
        return max(self.max_num_seqs, 1 + self.num_spare_rows)

    @property
    def kv_windows(self) -> KvWindows:
        """Which of a row's blocks each group needs."""
        return KvWindows(self.windows, self.block_size, self.tile_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the pool can hold if it has it to itself.  With windows it must be
        computed in small enough chunks, down to one block (``BlockManager.chunk_limit``).  No more than
        ``max_model_len`` are counted, because a longer sequence need not hold more blocks."""
        if not any(self.windows):
            return self.num_blocks // self.num_groups * self.block_size
        return _most_logical_blocks(self) * self.block_size

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of one sequence in one step.  A group with a window needs room for a whole chunk, most of which it
        gives back one step later.  A chunk takes at most a quarter of the pool, so that other sequences need not wait
        or be preempted for it."""
        if not any(self.windows):
            return self.max_num_batched_tokens
        num_blocks = max(1, self.num_blocks // (_CHUNKS_PER_POOL * self.num_groups))
        return min(self.max_num_batched_tokens, max(num_blocks * self.block_size, self.least_chunk_tokens))

    @property
    def max_sequence_tokens(self) -> int:
        """Longest possible sequence.  Its last token is sampled but never computed, so it needs no slot."""
        return min(self.max_model_len, self.capacity_tokens + 1)

    @property
    def max_blocks_per_row(self) -> int:
        """Width of a block table."""
        return ceil_div(min(self.max_sequence_tokens, self.capacity_tokens), self.block_size)


@lru_cache(maxsize=8)  # every request asks for it
def _most_logical_blocks(limits: SchedulerLimits) -> int:
    """The most that a sequence has which fits into the model, and alone into the pool."""
    windows, chunk = limits.kv_windows, limits.least_chunk_tokens
    numbers = range(ceil_div(limits.max_model_len, limits.block_size) + 1)
    return bisect_right(numbers, limits.num_blocks, key=lambda number: windows.most_blocks(number, chunk)) - 1
