"""Which adapters have a slot on the devices, and which sequence may enter with its own.

::

    loaded     every rank has its share on the host, from an order on, under a number that is never used again, its
               *generation*; a name stands for one generation
    resident   a plan has put it into a slot (``LOADS``); rows run with it
    retired    unloaded, or loaded again under its name: no new request has it, and those that had it end with it; then
               a plan says that the ranks may forget it (``DROPS``)

A slot that no running row uses is *idle*; it keeps its adapter until another one needs room, and the one that has been
idle for the longest time goes first.  A plan fills a slot before the rows run that use it, and after the steps of all
plans before it, so nothing waits.

A sequence whose adapter finds no slot lets others pass, those of resident adapters too: they share the slots that are
taken.  After ``PATIENCE`` steps no sequence with an adapter passes it any longer.  Rows end, so a slot becomes idle.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tp_engine.errors import RequestError, shown
from tp_engine.features.lora.feature import ADAPTER, DROPS, LIMITS, LOADS, ROWS, STATS, AdapterStats, AskedAdapter
from tp_engine.plan import StepPlan
from tp_engine.requests.request import EngineRequest
from tp_engine.sched.blocks.cache_keys import THE_MODEL, Variant
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.sequence import RequestGroup, Sequence

PATIENCE = 64
NO_ADAPTER = 0
NOT_FOUND = "model_not_found"


class LoRASlots(SchedulerFeature):
    """The owner of the names and of ``max_loras`` slots, numbered from 1 on as in plans; deterministic.  ``on_retire``
    are told each generation that no new request will have."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.on_retire: list[Callable[[int], None]] = []
        self._last_generation = NO_ADAPTER
        self._named: dict[str, int] = {}
        self._free = list(range(max_loras, 0, -1))
        self._slot_of: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # resident generations without rows, the oldest first
        self._num_rows: dict[int, int] = {}  # running, of generations that have some
        self._num_requests: dict[int, int] = {}  # unfinished, of loaded generations
        self._retired: set[int] = set()
        self._waiting_since: dict[int, int] = {}  # generation -> step
        self._step_id = 0
        self._must_drain = False
        self._loads: list[tuple[int, int]] = []
        self._entering: list[tuple[Sequence, int]] = []
        self._drops: list[int] = []

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.resolve.append(self.resolve)
        hooks.variant.append(self.variant)
        hooks.on_add.append(self.on_add)
        hooks.finish_plan.append(self.finish_plan)
        hooks.begin_admission.append(self.begin_admission)
        hooks.may_enter.append(self.may_enter)
        hooks.on_enter.append(self.on_enter)
        hooks.on_leave.append(self.on_leave)
        hooks.on_request_end.append(self.on_request_end)
        hooks.stats.append(self.stats)
        hooks.check_integrity.append(self.check_integrity)

    def __contains__(self, name: str) -> bool:
        """Whether an adapter is loaded under this name."""
        return name in self._named

    def new_generation(self) -> int:
        """Return a new number, for one load."""
        self._last_generation += 1
        return self._last_generation

    def add(self, name: str, generation: int) -> None:
        """Enter an adapter that all ranks have loaded; what had the name before is retired."""
        assert NO_ADAPTER < generation <= self._last_generation and generation not in self._num_requests
        if name in self._named:
            self.retire(name)
        self._named[name], self._num_requests[generation] = generation, 0

    def retire(self, name: str) -> None:
        """Refuse the adapter to new requests; those that have it end with it."""
        generation = self._named.pop(name)
        self._retired.add(generation)
        self._forget_unused(generation)
        for on_retire in self.on_retire:
            on_retire(generation)

    def check_loaded(self, name: str) -> None:
        """``RequestError`` unless an adapter is loaded under this name."""
        if name not in self._named:
            raise RequestError(f"no adapter is loaded under the name {shown(name)}", param="model", code=NOT_FOUND)

    def resolve(self, request: EngineRequest) -> EngineRequest:
        """Return the request with the generation that its adapter's name stands for now; ``RequestError`` if it is
        unknown."""
        asked = ADAPTER.get(request)
        if asked is None:
            return request
        self.check_loaded(asked.name)
        found = AskedAdapter(name=asked.name, generation=self._named[asked.name])
        return replace(request, extensions={**request.extensions, ADAPTER.name: found})

    def variant(self, request: EngineRequest) -> Variant:
        """Return the request's adapter as a variant of the model."""
        asked = ADAPTER.get(request)
        return THE_MODEL if asked is None else Variant(asked.generation, asked.name)

    def on_add(self, group: RequestGroup) -> None:
        """Keep the request's adapter loaded."""
        if (generation := _generation(group)) != NO_ADAPTER:
            self._num_requests[generation] += 1

    def on_request_end(self, group: RequestGroup) -> None:
        if (generation := _generation(group)) != NO_ADAPTER:
            self._num_requests[generation] -= 1
            self._forget_unused(generation)

    def begin_admission(self, step_id: int) -> None:
        self._step_id, self._must_drain = step_id, False

    def may_enter(self, sequence: Sequence) -> bool:
        """Return whether its adapter, if it has one, has a slot or can get one."""
        generation = _generation(sequence.group)
        if generation == NO_ADAPTER:
            return True
        if self._must_drain:
            return False
        if generation in self._slot_of or self._free or self._idle:
            return True
        since = self._waiting_since.setdefault(generation, self._step_id)
        self._must_drain = self._step_id - since >= PATIENCE
        return False

    def on_enter(self, sequence: Sequence) -> None:
        """Give the sequence its adapter's slot."""
        generation = _generation(sequence.group)
        if generation == NO_ADAPTER:
            return
        self._waiting_since.pop(generation, None)
        self._idle.pop(generation, None)
        if generation not in self._slot_of:
            slot = self._free.pop() if self._free else self._slot_of.pop(self._idle.popitem(last=False)[0])
            self._slot_of[generation] = slot
            self._loads.append((generation, slot))
        self._num_rows[generation] = self._num_rows.get(generation, 0) + 1
        self._entering.append((sequence, self._slot_of[generation]))

    def on_leave(self, sequence: Sequence) -> None:
        generation = _generation(sequence.group)
        if generation == NO_ADAPTER:
            return
        self._num_rows[generation] -= 1
        if not self._num_rows[generation]:
            del self._num_rows[generation]
            self._idle[generation] = None

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan with what the ranks must put into slots and may forget since the last one, and the slots of
        rows."""
        if not (self._entering or self._drops):
            return plan
        rows = [(sequence.row, slot) for sequence, slot in self._entering]
        sections = {LOADS: self._loads, ROWS: rows, DROPS: self._drops}
        self._loads, self._entering, self._drops = [], [], []
        return plan.extended({one.name: np.array(found, dtype=np.int32) for one, found in sections.items() if found})

    def stats(self) -> dict[str, AdapterStats]:
        running, waiting = (
            tuple(sorted(name for name, generation in self._named.items() if generation in of))
            for of in (self._num_rows, self._waiting_since)
        )
        return {STATS.name: AdapterStats(max_loras=self.max_loras, running=running, waiting=waiting)}

    def check_integrity(self) -> None:
        """Assert that every slot is free, idle or used, once."""
        assert sorted([*self._free, *self._slot_of.values()]) == list(range(1, self.max_loras + 1))
        assert self._slot_of.keys() == self._idle.keys() | self._num_rows.keys()
        assert not self._idle.keys() & self._num_rows.keys()
        assert self._slot_of.keys() <= self._num_requests.keys() == {*self._retired, *self._named.values()}

    def _forget_unused(self, generation: int) -> None:
        """If no request has a retired adapter, its slot is free, and the ranks forget it."""
        if generation not in self._retired or self._num_requests[generation]:
            return
        self._retired.remove(generation)
        del self._num_requests[generation]
        self._waiting_since.pop(generation, None)
        if generation in self._idle:
            del self._idle[generation]
            self._free.append(self._slot_of.pop(generation))
        self._drops.append(generation)


def _generation(group: RequestGroup) -> int:
    asked = ADAPTER.get(group.request)
    return NO_ADAPTER if asked is None else asked.generation


def make(parts: SchedulerParts) -> Iterator[LoRASlots]:
    """Make the scheduler's half if there are slots."""
    found = LIMITS.get(parts.state.limits)
    if found is not None:
        yield LoRASlots(found.max_loras)
