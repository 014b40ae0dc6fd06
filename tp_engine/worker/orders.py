"""What all ranks do together or not at all: orders of an operator, and the phases of the start.

::

    rank 0    plan with an order -> prepare --+                    +--> commit, if all ranks can
    rank 1                          prepare --+--> any failure? -+
    rank 2                          prepare --+                    +--> discard, if one cannot: nothing has changed

No step is in flight meanwhile.  ``prepare`` reads and checks: all that can fail, and nothing that others see.  Ranks
exchange their errors then.  ``commit`` must not fail: a rank whose commit raises has failed, and ends the job.

To add an order, write its ``prepare`` in a file of its own, and add a line to ``Worker._orders``, which gives it what
it needs of the rank.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from tp_engine.distributed.groups import HostGroup, RankGroups
from tp_engine.distributed.rank import attempt
from tp_engine.errors import RankError
from tp_engine.job.progress import RankPhase, RankProgress, tell_progress
from tp_engine.plan import Order
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")

Arguments: TypeAlias = Mapping[str, Any]
"""An order's arguments: values that JSON has."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An order that this rank can follow.

    ``commit`` does it; what rank 0 returns goes to the operator, as JSON's types.  ``discard`` frees what was prepared,
    because another rank cannot follow.
    """

    commit: Callable[[], dict[str, Any] | None]
    discard: Callable[[], None] = lambda: None


Prepare: TypeAlias = Callable[[Arguments], Prepared]
"""Raises any error if this rank cannot follow; then it must have changed nothing, and hold nothing."""


class Outcome(NamedTuple):
    """``refusal`` names the first rank that could not follow, with the reason; empty if all did.  Equal on all ranks.

    ``result`` is this rank's own.
    """

    refusal: str
    result: dict[str, Any]


def execute_command(data: bytes, orders: Mapping[str, Prepare], groups: RankGroups) -> Outcome:
    """Follow a plan's order, one of ``orders``; every rank calls this with the same bytes."""
    order, progress = msgspec.json.decode(data, type=Order), groups.progress

    def prepare() -> Prepared:
        progress.reach(RankPhase.PREPARE)
        return orders[order.kind](order.arguments)

    prepared, _, failed = attempt(groups.host, _then_done(prepare, progress))
    if failed:
        if prepared is not None:
            prepared.discard()
        rank, text = next(iter(failed.items()))
        if groups.info.is_first:
            logger.warning("%s was refused: rank %d: %s", order.kind, rank, text)
        return Outcome(f"rank {rank}: {text}", {})
    assert prepared is not None
    progress.reach(RankPhase.COMMIT)
    return Outcome("", prepared.commit() or {})


def _then_done(body: Callable[[], Result], progress: RankProgress) -> Callable[[], Result]:
    """Return what runs ``body`` and notes that this rank is through with its part of it, or has failed in it."""

    def run() -> Result:
        try:
            return body()
        finally:
            progress.done()

    return run


class StartUp:
    """Runs the phases of the start on all ranks; ``seconds`` has the time of each phase on this rank."""

    def __init__(self, group: HostGroup, progress: RankProgress) -> None:
        self._group = group
        self._progress = progress
        self.seconds: dict[str, float] = {}

    def run(self, name: str, body: Callable[[], Result]) -> Result:
        """Run a phase that may contain collectives: a failure ends this rank, and the other ranks notice its end."""
        started_s = time.perf_counter()
        tell_progress(name)
        result = body()
        self.seconds[name] = time.perf_counter() - started_s
        logger.debug("%s took %.2f s", name, self.seconds[name])
        return result

    def tell(self) -> None:
        """Log that the rank is ready, and which phases took long."""
        total_s = sum(self.seconds.values())
        long = {name: took_s for name, took_s in self.seconds.items() if took_s >= max(0.1, total_s / 20)}
        logger.info("ready: %s", ", ".join(f"{name} {took_s:.1f} s" for name, took_s in long.items()) or "at once")

    def run_agreed_phase(self, name: str, body: Callable[[], Result]) -> Result:
        """Run a phase without collectives: if it fails on one rank, it raises on every rank and names that one.

        The failing rank raises its own error, the others a ``RankError`` that carries its text.
        """
        result, failure, failed = attempt(self._group, _then_done(partial(self.run, name, body), self._progress))
        if failure is not None:
            raise failure
        for rank, text in failed.items():
            raise RankError(rank, f"{name} failed: {text}")
        return cast("Result", result)
