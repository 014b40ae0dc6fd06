"""What ``tell_progress`` says of this process, as bars on a terminal, or as lines in the log if there is none."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tp_engine.job.progress import Progress, hearing_progress
from tp_engine.system.log import get_logger
from tp_engine.system.progress_bar import progress_bar

logger = get_logger(__name__)

_DELAY_S = 1.0  # of a bar, so that what is quick shows none
_MOST_LETTERS = 48


@contextmanager
def shown_progress() -> Iterator[None]:
    """Show it, within; bars vanish with their work."""
    bars = _Bars()
    try:
        with hearing_progress(bars.show):
            yield
    finally:
        bars.close()


class _Bars:
    """One bar at a time: the next kind of work ends the one before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None
        self._kind: tuple[int | None, str] | None = None

    def show(self, told: Progress) -> None:
        with self._lock:
            if told.done is None:
                self._end()
                return
            if self._kind != (told.total, told.unit):
                self._end()
                self._kind = told.total, told.unit
                from tqdm import tqdm

                tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore, shared with processes that show no bar
                self._bar = progress_bar(
                    told.what[:_MOST_LETTERS],
                    total=told.total,
                    unit="",
                    say=lambda text: logger.info("%s", text),
                    delay_s=_DELAY_S,
                    leave=False,
                )
            self._bar.set_description(told.what[:_MOST_LETTERS], refresh=False)
            self._bar.update(max(0, told.done - self._bar.n))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = self._kind = None
