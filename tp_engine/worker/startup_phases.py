"""What all ranks do together or not at all: they tell each other what failed, and all draw the same conclusion."""

import time
from collections.abc import Callable
from typing import TypeVar

from tp_engine.distributed.groups import HostGroup
from tp_engine.errors import RankError
from tp_engine.log import get_logger
from tp_engine.progress import RankProgress, tell_progress

logger = get_logger(__name__)

Result = TypeVar("Result")


def failures(failure: Exception | None, group: HostGroup, progress: RankProgress) -> dict[int, str]:
    """Return the ranks on which a phase has failed, each with the text of its error; a collective.

    ``failure`` is this rank's own error.
    """
    progress.done()
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    return {rank: report.decode() for rank, report in enumerate(group.all_gather_bytes(text.encode())) if report}


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
        logger.info("%s took %.2f s", name, self.seconds[name])
        return result

    def run_agreed_phase(self, name: str, body: Callable[[], Result]) -> Result:
        """Run a phase without collectives: if it fails on one rank, it raises on every rank and names that one.

        The failing rank raises its own error, the others a ``RankError`` that carries its text.
        """
        failure: Exception | None = None
        try:
            result = self.run(name, body)
        except Exception as error:
            failure = error
        failed = failures(failure, self._group, self._progress)
        if failure is not None:
            raise failure
        for rank, text in failed.items():
            raise RankError(rank, f"{name} failed: {text}")
        return result
