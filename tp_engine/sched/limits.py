"""What the scheduler must stay within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of the pool and of a step.

    ``max_num_seqs`` rows exist in the batch; a step computes at most ``max_num_batched_tokens`` tokens; a sequence has
    at most ``max_model_len`` tokens, prompt included.  ``seed`` derives the seeds of requests that bring none.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            assert getattr(self, name) >= 1, f"{name} is {getattr(self, name)}"

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose K/V the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """Longest possible sequence.  Its last token is sampled but never computed, so it needs no slot."""
        return min(self.max_model_len, self.capacity_tokens + 1)

    @property
    def max_blocks_per_row(self) -> int:
        """Width of a block table."""
        return -(-min(self.max_sequence_tokens, self.capacity_tokens) // self.block_size)
