"""How long a device takes for parts of steps, without waiting for it."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SpanClock:
    """Adds up the seconds of ``span`` blocks on ``device``; on a GPU those of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure what is launched inside of this block."""
        if self._device.type != "cuda":
            started_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started_s
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._open.append((begin, end))
        self.seconds()  # events that have happened are not kept

    def seconds(self) -> float:
        """Return the sum of the spans that have ended."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds
