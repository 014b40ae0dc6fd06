"""Orders: what an operator asks of all ranks at once, which all of them do or none.

::

    rank 0    plan with an order -> prepare --+                    +--> commit, if all ranks can
    rank 1                          prepare --+--> any failure? -+
    rank 2                          prepare --+                    +--> discard, if one can not: nothing has changed

No step is in flight meanwhile.  ``prepare`` reads and checks: all that can fail, and nothing that others see.  Ranks
exchange their errors then.  ``commit`` must not fail: a rank whose commit raises has failed, and ends the job.

To add an order, write its ``prepare`` in a file of its own, and add a line to ``ORDERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from tp_engine.log import get_logger
from tp_engine.plan import Order
from tp_engine.progress import RankPhase
from tp_engine.worker.adapters import LoadedAdapter
from tp_engine.worker.sleep import Sleep, WakeUp
from tp_engine.worker.together import failures
from tp_engine.worker.weight_update import WeightUpdate

if TYPE_CHECKING:
    from tp_engine.worker.worker import Worker

logger = get_logger(__name__)

Arguments: TypeAlias = Mapping[str, Any]
"""An order's arguments: values that JSON has."""


class Prepared(Protocol):
    """An order that this rank can follow."""

    def commit(self) -> dict[str, Any]:
        """Do it; what rank 0 returns goes to the operator, as JSON's types."""

    def discard(self) -> None:
        """Free what was prepared, because another rank can not follow."""


Prepare: TypeAlias = Callable[["Worker", Arguments], Prepared]
"""Raises any error if this rank can not follow; then it must have changed nothing, and hold nothing."""


class Outcome(NamedTuple):
    """``refusal`` names the first rank that could not follow, with the reason; empty if all did.  Equal on all ranks.

    ``result`` is this rank's own.
    """

    refusal: str
    result: dict[str, Any]


class Trace:
    """The beginning or the end of a trace of all ranks' steps."""

    def __init__(self, worker: Worker, begins: bool) -> None:
        assert worker.profiler is not None, "rank 0 has checked that there is a folder for traces"
        self._profiler, self._begins = worker.profiler, begins

    def commit(self) -> dict[str, Any]:
        """See ``Prepared``; a trace that ends is written."""
        if self._begins:
            self._profiler.start()
        else:
            self._profiler.stop()
        return {}

    def discard(self) -> None:
        """See ``Prepared``."""


ORDERS: dict[str, Prepare] = {
    "load_adapter": lambda worker, arguments: LoadedAdapter(worker.adapters, **arguments),
    "sleep": Sleep,
    "start_profile": lambda worker, _arguments: Trace(worker, begins=True),
    "stop_profile": lambda worker, _arguments: Trace(worker, begins=False),
    "update_weights": WeightUpdate,
    "wake_up": WakeUp,
}


def obey(worker: Worker, data: bytes) -> Outcome:
    """Follow a plan's order; every rank calls this with the same bytes."""
    order = msgspec.json.decode(data, type=Order)
    progress = worker.groups.progress
    prepared: Prepared | None = None
    failure: Exception | None = None
    try:
        progress.reach(RankPhase.PREPARE)
        prepared = ORDERS[order.kind](worker, order.arguments)
    except Exception as error:
        failure = error
    failed = failures(failure, worker.groups.host, progress)
    if failed:
        if prepared is not None:
            prepared.discard()
        rank, text = next(iter(failed.items()))
        if worker.groups.info.is_first:
            logger.warning("%s was refused: rank %d: %s", order.kind, rank, text)
        return Outcome(f"rank {rank}: {text}", {})
    assert prepared is not None
    progress.reach(RankPhase.COMMIT)
    return Outcome("", prepared.commit())
