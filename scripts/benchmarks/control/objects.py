"""The usual small-engine design, written for comparison: one Python object per sequence, lists for block tables.

The hash of a block is computed when the block is full; the prefix cache looks blocks up by hash.  Each step loops over
the sequences twice: in the scheduler, and after the model.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import xxhash


class Sequence:
    """One request.  Its pickle holds the block table, and all tokens or, once it decodes, the last token."""

    _ids = count()

    def __init__(self, token_ids: list[int], *, priority: int, max_tokens: int, stop_ids: frozenset[int]) -> None:
        self.seq_id = next(self._ids)
        self.priority = priority
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.temperature = 0.0
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.is_finished = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def __lt__(self, other: Sequence) -> bool:
        return (self.priority, self.seq_id) < (other.priority, other.seq_id)

    def __getstate__(self) -> tuple[Any, ...]:
        has_decoded = len(self.token_ids) > self.num_prompt_tokens
        tokens = self.token_ids[-1] if has_decoded else self.token_ids
        lengths = (len(self.token_ids), self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens)
        return (*lengths, self.block_table, tokens)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens, self.block_table, tokens = state
        self.token_ids = tokens if isinstance(tokens, list) else [tokens]


class Block:
    """One block of the pool."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.token_ids: list[int] = []


class BlockManager:
    """Reference counts, a free queue, and the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = deque(range(num_blocks))
        self.used_block_ids: set[int] = set()

    def can_allocate(self, sequence: Sequence) -> bool:
        return len(self.free_block_ids) >= -(-len(sequence) // self.block_size)

    def allocate(self, sequence: Sequence) -> None:
        """Allocate blocks for all tokens; blocks in the cache are shared."""
        parent, is_hit = -1, True
        for start in range(0, len(sequence), self.block_size):
            tokens = sequence.token_ids[start : start + self.block_size]
            name = self._hash(tokens, parent) if len(tokens) == self.block_size else -1
            found = self.hash_to_block_id.get(name, -1)
            is_hit = is_hit and found >= 0 and self.blocks[found].token_ids == tokens
            if is_hit and found in self.used_block_ids:
                self.blocks[found].ref_count += 1
            else:
                found = self._take(found if is_hit else self.free_block_ids[0])
            if is_hit:
                sequence.num_cached_tokens += self.block_size
            if name >= 0:
                self._name(found, name, tokens)
            sequence.block_table.append(found)
            parent = name

    def can_append(self, sequence: Sequence) -> bool:
        return len(self.free_block_ids) >= (len(sequence) % self.block_size == 1)

    def may_append(self, sequence: Sequence) -> None:
        """Before a decode: allocate a block if the token begins one; hash the last block if it is full."""
        place = len(sequence) % self.block_size
        if place == 1:
            sequence.block_table.append(self._take(self.free_block_ids[0]))
        elif place == 0:
            tokens = sequence.token_ids[-self.block_size :]
            parent = self.blocks[sequence.block_table[-2]].hash if len(sequence.block_table) > 1 else -1
            self._name(sequence.block_table[-1], self._hash(tokens, parent), tokens)

    def deallocate(self, sequence: Sequence) -> None:
        for block_id in reversed(sequence.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids.append(block_id)
        sequence.block_table = []

    @staticmethod
    def _hash(tokens: list[int], parent: int) -> int:
        return xxhash.xxh64_intdigest(parent.to_bytes(8, "little", signed=parent < 0) + np.array(tokens).tobytes())

    def _take(self, block_id: int) -> int:
        block = self.blocks[block_id]
        block.ref_count, block.hash, block.token_ids = 1, -1, []
        self.free_block_ids.remove(block_id)
        self.used_block_ids.add(block_id)
        return block_id

    def _name(self, block_id: int, name: int, tokens: list[int]) -> None:
        block = self.blocks[block_id]
        block.hash, block.token_ids = name, tokens
        self.hash_to_block_id[name] = block_id


class Scheduler:
    """Schedules decodes first, then waiting requests by priority, within one budget of tokens."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = BlockManager(num_blocks, block_size)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self.waiting, sequence)

    def schedule(self) -> list[Sequence]:
        """The sequences of this step, with ``num_scheduled_tokens`` set."""
        scheduled: list[Sequence] = []
        budget = self.max_num_batched_tokens
        while self.running and budget > 0:
            sequence = self.running.popleft()
            while not self.block_manager.can_append(sequence):
                if not self.running:
                    self._preempt(sequence)
                    break
                self._preempt(self.running.pop())
            else:
                self.block_manager.may_append(sequence)
                sequence.num_scheduled_tokens = min(len(sequence) - sequence.num_computed_tokens, budget)
                budget -= sequence.num_scheduled_tokens
                scheduled.append(sequence)
        while self.waiting and budget > 0 and len(scheduled) < self.max_num_seqs:
            if not self.block_manager.can_allocate(self.waiting[0]):
                break
            sequence = heapq.heappop(self.waiting)
            self.block_manager.allocate(sequence)
            sequence.num_computed_tokens = min(sequence.num_cached_tokens, len(sequence) - 1)
            sequence.num_scheduled_tokens = min(len(sequence) - sequence.num_computed_tokens, budget)
            budget -= sequence.num_scheduled_tokens
            scheduled.append(sequence)
        self.running.extendleft(reversed(scheduled))
        return scheduled

    def postprocess(self, scheduled: list[Sequence], token_ids: list[int]) -> None:
        """Append the tokens and end finished sequences."""
        for sequence, token_id in zip(scheduled, token_ids, strict=True):
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            if sequence.num_computed_tokens < len(sequence):
                continue
            sequence.token_ids.append(token_id)
            num_generated = len(sequence) - sequence.num_prompt_tokens
            if token_id in sequence.stop_ids or num_generated == sequence.max_tokens:
                self.remove([sequence])

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """End these running sequences."""
        for sequence in sequences:
            sequence.is_finished = True
            self.block_manager.deallocate(sequence)
            self.running.remove(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.block_manager.deallocate(sequence)
        sequence.num_computed_tokens = sequence.num_cached_tokens = 0
        heapq.heappush(self.waiting, sequence)
