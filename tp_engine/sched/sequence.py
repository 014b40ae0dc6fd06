"""A request inside the scheduler: a group of ``n`` sequences.

States of a sequence::

      add()           admitted at a row         last chunk scheduled      last possible token scheduled
    ---------> WAITING -----------------> PREFILL -----------------> DECODE -------------------------> ENDING
                  ^                          |                          |                                |
                  |   preempted: row and     |                          |                                |
                  |   blocks are given back  |                          |                                |
                  +--------------------------+--------------------------+                                |
                  |                          |                          |                                |
                  +------ abort() -----------+-------- abort() ---------+------- stop, length -----------+--> FINISHED

A request with a grammar waits outside of the queue until it is compiled (``readiness``).

The moves to the right happen when a step is *scheduled*, because the next step may be scheduled before the result of
this one is known.  The end of a sequence is found when a result comes in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tp_engine.plan import POOLS_ALL, IntArray, RowSampling
from tp_engine.requests.request import EngineRequest
from tp_engine.sched.blocks.kv_windows import Counts
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import Place
from tp_engine.sched.readiness import Blocked

NO_ROW = -1
#: A client's sequences run in this order, smallest first: (priority, turn, number of the request, index of the
#: sequence).  Unique; ``waiting_queue`` tells what a turn is.
OrderKey: TypeAlias = tuple[int, int, int, int]


class SequencePhase(enum.IntEnum):
    """Where a sequence is; a vacant row has WAITING in ``RunningBatch.phase``."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    ENDING = 3
    FINISHED = 4


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request and its sequences; ``running`` are those with a row, in order of admission.  ``cache_key`` is what
    precedes the first block of its sequences in the prefix cache (``CacheKeys``).

    ``sequences`` are those that have been made: the first, and one more whenever the last of them leaves the queue
    (``SchedulerState.pop_waiting``).  So a request costs the same when it comes in, whatever its ``n`` is.  ``make``
    gives the sequence of an index; ``num_unmade`` will follow.  They begin with ``prompt``.
    """

    request: EngineRequest
    number: int
    cache_key: str
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    prompt: IntArray
    make: Callable[[RequestGroup, int], Sequence]
    num_unmade: int
    sequences: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0

    def make_next(self) -> Sequence:
        """Make the next sequence, which waits."""
        made = self.make(self, len(self.sequences))
        self.sequences.append(made)
        self.num_unmade -= 1
        return made

    def check_integrity(self) -> tuple[int, int, int]:
        """Assert that its counts agree; how many of its sequences run, wait, and are not in the queue yet."""
        phases = [sequence.phase for sequence in self.sequences]
        num_made = sum(phase is not SequencePhase.FINISHED for phase in phases)
        assert self.num_unfinished == num_made + self.num_unmade > 0
        assert not self.num_unmade or self.sequences[-1].phase is SequencePhase.WAITING
        idle = (SequencePhase.WAITING, SequencePhase.FINISHED)
        assert all(sequence.phase not in idle for sequence in self.running)
        num_parked = sum(bool(sequence.blocked) for sequence in self.sequences)
        return len(self.running), phases.count(SequencePhase.WAITING) + self.num_unmade, num_parked


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's ``n`` outputs.

    ``token_ids`` (int32) are all known tokens while it has no row; while it has one, the row's buffer holds them.
    They are names in the prefix cache: where an image's embeddings stand they are negative (``images``).
    It ends with ``length`` at ``max_total_tokens`` tokens, the prompt's included.
    ``num_published`` of its blocks have been offered to the prefix cache since it got its row; ``place`` is the place
    after them there.
    ``blocked`` says why it is not in the queue yet.
    ``body_place`` is its number among all sequences of its body; it ``has_displaced`` others that gave way to it.
    ``num_lost_tokens`` were computed before a preemption and have not been computed again.
    When it has computed ``snapshots_at`` tokens, a snapshot of its recurrent state is taken.
    ``extensions`` has what features keep of it.
    """

    group: RequestGroup
    index: int
    key: OrderKey
    sampling: RowSampling
    token_ids: IntArray
    num_prompt_tokens: int
    max_total_tokens: int
    body_place: int
    phase: SequencePhase = SequencePhase.WAITING
    blocked: Blocked = Blocked.NOTHING
    row: int = NO_ROW
    num_published: int = 0
    place: Place = ""
    num_preemptions: int = 0
    has_displaced: bool = False
    num_lost_tokens: int = 0
    num_cached_tokens: int = 0
    snapshots_at: tuple[int, ...] = ()
    first_scheduled_s: float = 0.0
    emitted: bool = False
    extensions: dict[str, Any] = field(default_factory=dict)
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.group.request.request_id

    @property
    def ids_for_ranks(self) -> IntArray:
        """Its tokens, of images the model's placeholder."""
        request = self.group.request
        if not request.images:
            return self.token_ids
        placeholder = np.int32(request.prompt_token_ids[request.images[0].start])
        return np.where(self.token_ids < 0, placeholder, self.token_ids)

    @property
    def can_fork(self) -> bool:
        """Whether it may begin as a copy of a sibling that has computed the prompt: until it has been preempted."""
        return len(self.token_ids) == self.num_prompt_tokens and not self.wants_all_positions

    @property
    def has_waiting_siblings(self) -> bool:
        """Whether another sequence of its request waits."""
        group = self.group
        return group.num_unmade > 0 or any(
            one.phase is SequencePhase.WAITING for one in group.sequences if one is not self
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until its first token."""
        return self.sampling.prompt_logprobs >= 0

    @property
    def wants_all_positions(self) -> bool:
        """Whether every prompt position must be computed, so that no cached block may be used."""
        return self.wants_prompt_logprobs or self.sampling.pools == POOLS_ALL


class Shared(msgspec.Struct, frozen=True):
    """The logical blocks that a table begins with, (n, G): in each group they are needed from ``first`` (G,) on, and 0
    before that.  ``held`` are those needed, logical block by logical block."""

    table: BlockIds
    first: Counts
    held: BlockIds


class Entry(msgspec.Struct):
    """A sequence that enters the batch, from the decision until it has a row.

    It begins with ``shared`` blocks, which it holds already, and needs more up to its first ``end`` tokens.  Its first
    ``num_computed`` tokens have K/V.  The first logical block after the shared ones begins as a copy of ``source``
    (G,), if there is one.  ``num_published`` and ``place`` are where it goes on in the prefix cache.

    If ``must_load``, it computes nothing until the loads of its shared blocks have gone out.  Its recurrent state is
    copied from the slot ``state_source``, or begins with zeros.
    """

    sequence: Sequence
    shared: Shared
    num_computed: int
    end: int
    source: BlockIds | None
    num_published: int
    place: Place
    must_load: bool = False
    state_source: int | None = None
