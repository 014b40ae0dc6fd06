"""The phases of a rank's start: timed, logged, and agreed on: one rank's failure is everyone's clear failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tp_engine.errors import RankError
from tp_engine.log import get_logger
from tp_engine.progress import RankProgress
from tp_engine.ranks.groups import HostGroup

logger = get_logger(__name__)

Result = TypeVar("Result")


class Phases:
    """Runs one phase after another on all ranks; ``seconds`` has the time of each on this rank, by its name."""

    def __init__(self, group: HostGroup, progress: RankProgress) -> None:
        self._group = group
        self._progress = progress
        self.seconds: dict[str, float] = {}

    def run(self, name: str, body: Callable[[], Result]) -> Result:
        """A phase that may contain collectives: a failure ends this rank, which its peers notice by themselves."""
        started_s = time.perf_counter()
        result = body()
        self.seconds[name] = time.perf_counter() - started_s
        logger.info("%s took %.2f s", name, self.seconds[name])
        return result

    def run_together(self, name: str, body: Callable[[], Result]) -> Result:
        """A phase without collectives: if it fails on any rank, it raises on every rank and names the one.

        The failing rank raises its own error, the others a ``RankError`` that carries its text.
        """
        try:
            result, failure = self.run(name, body), None
        except Exception as error:
            failure = error
        self._progress.done()
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reports = self._group.all_gather_bytes(text.encode())
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report:
                raise RankError(rank, f"{name} failed: {report.decode()}")
        return result
