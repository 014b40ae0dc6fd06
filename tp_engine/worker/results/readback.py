"""Copies of a step's results to the host, which wait for that step only, and end if another rank does.

On CUDA a copy goes to pinned memory after the kernels that make its content, and an event tells when it has arrived.
A plain ``.cpu()`` would also wait for the next step, which is launched by then.

The wait looks at the event again and again instead of sleeping in the driver: kernels that wait for a rank that has
died never end, and nothing can end them, so neither would a wait for them.  ``check`` raises then.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from time import monotonic, perf_counter, sleep
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy.typing as npt
import torch

from tp_engine.plan import NO_IDS, FloatArray, IntArray, StepPlan, StepResult, TokenLogprobs
from tp_engine.sampling.logprobs import Fetch

Check: TypeAlias = Callable[[], None]
"""Raises if another rank has died, failed or hung."""

# A decode step ends within a few milliseconds, and the wait for it is part of each step: only longer ones sleep.
_BUSY_S = 0.005
_NAP_S = 0.0001
_CHECK_S = 0.1


class PendingStep(msgspec.Struct, kw_only=True):
    """A step that is being launched, or runs; its results go to the host by ``fetch``, and its functions wait for
    them."""

    plan: StepPlan
    fetch: Fetch
    token_ids: Callable[[], IntArray] | None = None
    logprobs: Callable[[], TokenLogprobs] | None = None
    prompt_logprobs: dict[int, Callable[[], TokenLogprobs]] = {}
    pooled: list[Callable[[], dict[int, FloatArray]]] = []
    drafts: Callable[[], dict[int, IntArray]] | None = None

    def result(self) -> StepResult:
        """Return the step's ids and log-probabilities on the host."""
        result = StepResult(
            step_id=self.plan.step_id,
            token_ids=NO_IDS if self.token_ids is None else self.token_ids(),
            logprobs=None if self.logprobs is None else self.logprobs(),
            drafts={} if self.drafts is None else self.drafts(),
        )
        for row, wait in self.prompt_logprobs.items():
            result.prompt_logprobs[row] = wait()
        for wait_for_rows in self.pooled:
            result.pooled.update(wait_for_rows())
        return result


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Return whether the device has reached it."""


def never_fails() -> None:
    """The check of a rank without others."""


def wait_for(event: Event, check: Check) -> None:
    """Wait until the device has reached ``event``; raises what ``check`` raises, which is called every 0.1 s."""
    began_s = checked_s = monotonic()
    while not event.query():
        now_s = monotonic()
        if now_s - checked_s > _CHECK_S:
            check()
            checked_s = now_s
        sleep(0.0 if now_s - began_s < _BUSY_S else _NAP_S)  # even 0 lets other threads of the process run


class Readback:
    """Copies sampled ids, ``num_in_flight`` copies at once of at most ``max_num_ids`` ids, and other results.

    ``check`` is asked while this rank waits.
    """

    def __init__(
        self, max_num_ids: int, device: torch.device, check: Check = never_fails, *, num_in_flight: int = 3
    ) -> None:
        self._is_cuda = device.type == "cuda"
        self._check = check
        num_buffers = num_in_flight if self._is_cuda else 0
        self._buffers = cycle(
            [torch.empty(max_num_ids, dtype=torch.int32, pin_memory=True, device="cpu") for _ in range(num_buffers)]
        )
        self._seen: tuple[torch.Tensor | None, IntArray] = (None, NO_IDS)

    def start(self, token_ids: torch.Tensor) -> Callable[[], IntArray]:
        """Begin to copy ``token_ids`` (n,) int32; the returned function waits for them only.

        Its array may be read until ``num_in_flight`` further copies have begun.
        """
        if not self._is_cuda:
            if token_ids is not self._seen[0]:  # recorded steps leave their ids in the same tensor every time
                self._seen = token_ids, token_ids.numpy()
            ids = self._seen[1]
            return lambda: ids
        target = next(self._buffers)[: len(token_ids)]
        target.copy_(token_ids, non_blocking=True)
        arrived = record_event()

        def wait() -> IntArray:
            wait_for(arrived, self._check)
            found: IntArray = target.numpy()
            return found

        return wait

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
        """Begin to copy ``tensors`` of any shapes; the returned function waits for them only, and gives arrays."""
        if not self._is_cuda:
            return lambda: [tensor.cpu().numpy() for tensor in tensors]
        targets = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True, device="cpu") for one in tensors]
        for target, source in zip(targets, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = record_event()

        def wait() -> list[npt.NDArray[Any]]:
            wait_for(arrived, self._check)
            return [target.numpy() for target in targets]

        return wait


def record_event() -> Event:
    """Return an event after everything that the current stream has been given."""
    event: Any = torch.cuda.Event()
    event.record()
    found: Event = event
    return found


def mark(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Return an event after all that ``stream``, by default the current one, has now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class SpanClock:
    """Adds up the seconds of ``span`` blocks, and the bytes that they move: of those that have ended, where a stream
    runs what is launched (``is_async``)."""

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self._seconds, self._num_bytes = 0.0, 0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    @contextmanager
    def span(self, num_bytes: int = 0, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Measure what is launched inside of this block, on ``stream``, by default the current one."""
        if not self._is_async:
            started_s = perf_counter()
            yield
            self._seconds += perf_counter() - started_s
            self._num_bytes += num_bytes
            return
        begin = mark(stream)
        yield
        self._open.append((begin, mark(stream), num_bytes))
        self.read()  # events that have happened are not kept

    def read(self) -> tuple[float, int]:
        """Return the seconds and the bytes of the spans that have ended; does not wait for others."""
        while self._open and self._open[0][1].query():
            begin, end, num_bytes = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
            self._num_bytes += num_bytes
        return self._seconds, self._num_bytes
