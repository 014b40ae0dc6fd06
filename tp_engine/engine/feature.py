"""What an optional part of rank 0's engine may do, and when: a thread that publishes, a journal, writes while idle.

::

    build_engine    a function that the registry names is called with the configuration, before any rank has started
                    prepare;  start, once this rank has;  limits and ``given`` go to the scheduler; attach;
                    started
    Engine          add, forget;  before each step: settle;  no step in flight and nothing to run: idle;
                    no request: turn;  the end: flush, then close
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tp_engine.engine.admin import EngineAdmin
from tp_engine.ipc.job_board import JobBoard
from tp_engine.plan import StepPlan
from tp_engine.requests.request import EngineRequest, SequenceDelta
from tp_engine.sched.scheduler import Scheduler
from tp_engine.system.closing import Closing
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.worker import StartedRank

RunAlone: TypeAlias = Callable[[StepPlan], None]
"""Runs a plan without rows on all ranks, while no step is in flight."""


@dataclass(slots=True)
class EngineHooks:
    """What the engine calls, by hook: the functions of all features that are on, in the features' order."""

    add: list[Callable[[EngineRequest], bool]] = field(default_factory=list)
    """Gives a request to the scheduler itself, perhaps to hold it back there; whether it has."""

    forget: list[Callable[[Iterable[str] | None], None]] = field(default_factory=list)
    """These requests are aborted; all if None."""

    settle: list[Callable[[], list[SequenceDelta]]] = field(default_factory=list)
    """Lets requests run that were held back; the last deltas of those that cannot.  Called before each step."""

    settle_all: list[Callable[[Callable[[], object]], list[SequenceDelta]]] = field(default_factory=list)
    """``check``: waits until no request is held back, and settles all; ``check`` raises if waiting is in vain."""

    idle: list[Callable[[], None]] = field(default_factory=list)
    """All requests wait for something: waits a moment if it is for this feature."""

    turn: list[Callable[[RunAlone], bool]] = field(default_factory=list)
    """No request runs: does a part of what has been put off; whether there is more."""

    flush: list[Callable[[RunAlone], None]] = field(default_factory=list)
    """Does all of that that can be done in some seconds; the ranks will be stopped."""


class EngineFeature(Closing):
    """The base of all features; ``close`` is called once, also after a failed start."""

    @property
    def given(self) -> Any:
        """What the scheduler's half is given."""
        return self

    def prepare(self, effective: EffectiveConfig) -> None:
        """Do what takes a while and needs no rank, before this one has started."""

    def start(self, rank: StartedRank, board: JobBoard) -> None:
        """Take in what has started: this ``rank``, and what all ranks write on the ``board``."""

    def limits(self) -> Any:
        """Return the feature's part of ``SchedulerLimits``; None if there is nothing to schedule."""
        return None

    def started(self, operator: EngineAdmin) -> None:
        """Do what is to be done once, before the first request; ``ConfigError`` if it cannot be."""

    def attach(self, hooks: EngineHooks, scheduler: Scheduler) -> None:
        """Append to ``hooks`` what this feature does."""
