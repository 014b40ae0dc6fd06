"""A request inside the scheduler: a group of ``n`` sequences, each with its tokens, its place and its end.

States of a sequence::

      add()           admitted at a row         last chunk scheduled      last possible token scheduled
    ---------> WAITING -----------------> PREFILL -----------------> DECODE -------------------------> ENDING
                  ^                          |                          |                                |
                  |   preempted: row and     |                          |                                |
                  |   blocks are given back  |                          |                                |
                  +--------------------------+--------------------------+                                |
                  |                          |                          |                                |
                  +------ abort() -----------+-------- abort() ---------+------- stop, length -----------+--> FINISHED

A request with a grammar begins in COMPILING, which ``constrain`` ends when the grammar is there.

The moves to the right happen when a step is *scheduled*, for the next step may be scheduled before its result is known;
the end of a sequence is found when a result comes in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from tp_engine.plan import IntArray, RowSampling, TokenLogprobs
from tp_engine.request import EngineRequest
from tp_engine.sched.cached_run import Place
from tp_engine.sched.constraint import TokenConstraint

NO_ROW = -1

#: Who runs first, smallest first: (priority, number of the request, index of the sequence).  Unique.
OrderKey: TypeAlias = tuple[int, int, int]


class SequencePhase(enum.IntEnum):
    """Where a sequence is; the value for rows (``RowState.phase``) that nobody occupies is WAITING."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    ENDING = 3
    FINISHED = 4
    COMPILING = 5


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request and its sequences; ``running`` are those with a row, in order of admission."""

    request: EngineRequest
    number: int
    salt: str
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's ``n`` outputs.

    ``token_ids`` (int32) are all tokens known while it has no row; while it has one, the row's buffer is the truth.
    With ``max_tokens``, those of the prompt included, it ends with ``length``.
    ``num_published`` of its blocks have been offered to the prefix cache since it got its row, and ``place`` is how far
    it has come there.
    ``constraint`` is its place in the request's grammar.
    ``num_lost_tokens`` were computed before a preemption and have not been computed again.
    """

    group: RequestGroup
    index: int
    key: OrderKey
    sampling: RowSampling
    token_ids: IntArray
    num_prompt_tokens: int
    max_tokens: int
    phase: SequencePhase = SequencePhase.WAITING
    row: int = NO_ROW
    num_published: int = 0
    place: Place = ""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_cached_tokens: int = 0
    first_scheduled_s: float = 0.0
    emitted: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    constraint: TokenConstraint | None = None
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.group.request.request_id

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until its first token: every prompt position must be computed, so no cached block may be used."""
        return self.sampling.prompt_logprobs >= 0
