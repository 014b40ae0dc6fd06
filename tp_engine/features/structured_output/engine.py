"""Structured output beside rank 0's loop: grammars are compiled, and masks found, while it runs."""

from __future__ import annotations

from collections.abc import Callable

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature, EngineHooks
from tp_engine.features.structured_output.constraint import Masks
from tp_engine.features.structured_output.queue import GrammarQueue, make_compiler
from tp_engine.requests.request import EngineRequest, SequenceDelta
from tp_engine.sched.scheduler import Scheduler
from tp_engine.worker.effective_config import EffectiveConfig

_IDLE_SLICE_S = 0.005


def open_grammars(config: EngineConfig) -> GrammarsOfEngine:
    """Make the engine's half."""
    return GrammarsOfEngine()


class GrammarsOfEngine(EngineFeature):
    """The engine's queue of grammars, from its compiler on."""

    def __init__(self) -> None:
        self._queue: GrammarQueue | None = None

    @property
    def given(self) -> Masks | None:
        """What finds masks, once it is prepared."""
        return None if self._queue is None else self._queue.masks

    def prepare(self, effective: EffectiveConfig) -> None:
        """Make the compiler, which holds Python's lock for a while, so not between steps."""
        self._queue = GrammarQueue(make_compiler(effective), effective.model.vocab_size)

    def attach(self, hooks: EngineHooks, scheduler: Scheduler) -> None:
        queue = self._queue
        assert queue is not None, "nothing is prepared"

        def add(request: EngineRequest) -> bool:
            if request.is_constrained:
                queue.add(request, scheduler)
            return request.is_constrained

        def settle_all(check: Callable[[], object]) -> list[SequenceDelta]:
            return queue.settle_all(scheduler, check)

        hooks.add.append(add)
        hooks.forget.append(queue.forget)
        hooks.settle.append(lambda: queue.settle(scheduler))
        hooks.settle_all.append(settle_all)
        hooks.idle.append(lambda: queue.wait(_IDLE_SLICE_S))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
