"""Loads for what will run soon: what the host tier has of it comes in while other requests run.

::

    waiting   A  B  C  D ...          no row or no room for A yet
              |  |  |
              +--+--+--+
                       +--> hits on the host --> blocks of the pool, cached, held by no row --> loads of the next plans
              +--+-----+
              |  |
    early     E  F                    E's grammar is being compiled; F is a session that returns

A session is what a client calls so (``SamplingParams.prompt_cache_key``).  Its next prompt mostly begins with all that
its last one ended with, and is on its way for a while: a client says that it will come, or its text is being tokenized.

What is on disk is read first, into slots of the host tier; the next look goes on with it.

Such blocks may be taken again at any time, as cached blocks may, so prefetching holds nothing that a running row needs.
When the request enters, it finds them like any others.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tp_engine.features.tiers.feature import LIMITS, NEVER, WAIT
from tp_engine.features.tiers.host_tier import HostTierManager
from tp_engine.features.tiers.tier_waits import DiskWaits
from tp_engine.plan import IntArray
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import RequestGroup, Sequence, SequencePhase, Shared

_NUM_CANDIDATES = 3
_MOST_EARLY = 8
_STEPS_BETWEEN = 32  # looks at the same sequence
_PATIENCE_STEPS = 1024  # how long a session that was announced may be late
_IDLE_SHARE = _NUM_CANDIDATES + 1

SessionKey: TypeAlias = tuple[str, str]
"""The name that clients gave the session, and the cache key of its prefixes."""


class Sessions:
    """The tokens that each session ended with; the session that was used longest ago is forgotten first, so that all
    have at most ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._last: OrderedDict[SessionKey, IntArray] = OrderedDict()

    def note(self, key: SessionKey, token_ids: IntArray) -> None:
        """Keep ``token_ids``, prompt and output, with which a session's request has ended."""
        self.forget(key)
        self._last[key] = token_ids
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self.forget(next(iter(self._last)))

    def last(self, key: SessionKey) -> IntArray | None:
        """Return what it ended with; None for one that is not known."""
        return self._last.get(key)

    def forget(self, key: SessionKey) -> None:
        """Forget one session, if it is known."""
        if (known := self._last.pop(key, None)) is not None:
            self._num_tokens -= len(known)


@dataclass(slots=True, eq=False)
class Returning:
    """A session whose next request will come soon, and the tokens that it ended with."""

    cache_key: str
    token_ids: IntArray
    until_step: int
    extensions: dict[str, Any] = field(default_factory=dict)


class Prefetcher(SchedulerFeature):
    """Looks at the first sequences of the queue, and at those that will be in it, between two plans."""

    def __init__(self, state: SchedulerState, tier: HostTierManager, waits: DiskWaits | None) -> None:
        self._state, self._tier, self._waits = state, tier, waits
        limits = state.limits
        self._sessions = Sessions((limits.num_blocks + LIMITS.of(limits).num_host_slots) * limits.block_size)
        self._early: dict[str | SessionKey, Sequence | Returning] = {}

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.on_add.append(self.on_add)
        hooks.announce.append(self.announce)
        hooks.after_plan.append(self.after_plan)
        hooks.on_end.append(self.on_end)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._state.waiting or self._early)

    def announce(self, session: str, cache_key: str, step_id: int) -> None:
        """Bring forward what a known session will need."""
        key = session, cache_key
        token_ids = self._sessions.last(key)
        if token_ids is not None:
            self._early.pop(key, None)
            self._add(key, Returning(key[1], token_ids, step_id + _PATIENCE_STEPS))

    def on_add(self, group: RequestGroup) -> None:
        """Give the request what was brought forward for its session; its first sequence stands for all."""
        sequence = group.sequences[0]
        if (key := session_of(sequence)) is not None:
            announced = self._early.pop(key, None)
            if announced is not None:
                before, wait = WAIT.of(announced), WAIT.of(sequence)
                wait.num_prefetched_tokens, wait.num_read_blocks = before.num_prefetched_tokens, before.num_read_blocks
        if sequence.blocked & Blocked.MASK:
            self._add(sequence.request_id, sequence)

    def on_end(self, sequence: Sequence) -> None:
        if (key := session_of(sequence)) is not None:
            self._sessions.note(key, sequence.token_ids)

    def after_plan(self, step_id: int) -> None:
        """Begin the loads of at most one candidate, if those that were begun have gone out."""
        if not self.has_work or self._tier.is_loading:
            return
        for key in [key for key, one in self._early.items() if _is_over(one, step_id)]:
            del self._early[key]
        for one in (*self._state.waiting.first(_NUM_CANDIDATES), *self._early.values()):
            wait = WAIT.of(one)
            if wait.looked_at_step + _STEPS_BETWEEN <= step_id:
                wait.looked_at_step = step_id
                if self._load(one):
                    return

    def _add(self, key: str | SessionKey, one: Sequence | Returning) -> None:
        if len(self._early) == _MOST_EARLY:
            del self._early[next(iter(self._early))]
        self._early[key] = one

    def _load(self, one: Sequence | Returning) -> bool:
        """Begin the loads of the first blocks that are missing, as many as there is room for; whether there are any.
        With the blocks before them they may take a quarter of the idle blocks, besides one for each row, so that the
        candidates do not push each other out.  Nothing is dropped for them."""
        blocks, tier = self._state.blocks, self._tier
        hits = blocks.find_hits(one) if isinstance(one, Sequence) else blocks.find_prefix(one.cache_key, one.token_ids)
        shared = hits.shared
        on_host = tier.is_below(shared.held)
        if not on_host.any():
            return False
        if self._waits is not None and self._waits.read_ahead(WAIT.of(one), shared.held):
            return False
        is_wanted = on_host.copy()
        is_wanted[~on_host] = blocks.pool.ref_counts[shared.held[~on_host]] == 0
        num_idle = blocks.pool.num_available - self._state.rows.num_running * blocks.num_groups
        fits = (is_wanted.cumsum() <= num_idle // _IDLE_SHARE) & (on_host.cumsum() <= tier.num_moves_left)
        count = int(np.count_nonzero(fits))  # both sums only grow
        if not on_host[:count].any():
            return False
        if count < len(on_host):
            WAIT.of(one).looked_at_step = NEVER  # for the rest
        part = shared.held[:count]
        num_loaded = int(np.count_nonzero(on_host[:count]))
        WAIT.of(one).num_prefetched_tokens += num_loaded * blocks.block_size // blocks.num_groups
        blocks.pool.release(tier.hold(Shared(part[:, None], shared.first, part)).held)
        return True


def session_of(sequence: Sequence) -> SessionKey | None:
    """Return the session that the request belongs to, if it names one."""
    name = sequence.group.request.params.prompt_cache_key
    return None if name is None else (name, sequence.group.cache_key)


def _is_over(one: Sequence | Returning, step_id: int) -> bool:
    if isinstance(one, Returning):
        return one.until_step < step_id
    return one.phase is not SequencePhase.WAITING or not one.blocked
