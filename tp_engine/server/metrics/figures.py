"""The server's counts of requests, their tokens, HTTP exchanges and batches, for the event loop's thread alone.

An observation is a bisection and two additions, without a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric

from tp_engine.api.batches.objects import ACTIVE, ENDED, Batch
from tp_engine.features.metric import MetricFamily
from tp_engine.model_config.block_size import LengthCounter
from tp_engine.requests.outputs import RequestMetrics
from tp_engine.requests.request import FinishReason
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.families import histograms, number, samples

_HISTOGRAMS = (
    f.FIRST_TOKEN, f.NEXT_TOKEN, f.PER_TOKEN, f.E2E, f.QUEUE, f.PREFILL, f.DECODE, f.INFERENCE, f.REQUEST_PROMPT,
    f.REQUEST_GENERATION, f.PARAMS_N, f.PARAMS_MAX_TOKENS, f.IMAGE_LOAD,
)  # fmt: skip
_DEFAULT_MAX_MODEL_LEN = 1 << 20  # until the engine's is known


class RequestFigures:
    """Totals of requests and tokens since the start."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_images = 0
        self.num_image_tokens = 0
        self.lengths = LengthCounter()
        self.ends: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._histograms = {family: Histogram(family.bounds(_DEFAULT_MAX_MODEL_LEN)) for family in _HISTOGRAMS}

    def set_max_model_len(self, max_model_len: int) -> None:
        """Size the histograms of tokens; call it before the first request."""
        for family in _HISTOGRAMS:
            if family.buckets is None:
                self._histograms[family] = Histogram(family.bounds(max_model_len))

    def histogram(self, family: MetricFamily) -> Histogram:
        """The histogram of ``family``."""
        return self._histograms[family]

    def note_image_seconds(self, seconds: deque[float]) -> None:
        """Count, and remove, the times that images of requests have taken."""
        while seconds:
            self.histogram(f.IMAGE_LOAD).observe(seconds.popleft())

    def observe_request(self, num_prompt_tokens: int, params: SamplingParams, times: RequestMetrics | None) -> None:
        """Count a request all of whose ``n`` sequences have finished; ``times`` are None where they are unknown."""
        self.histogram(f.REQUEST_PROMPT).observe(num_prompt_tokens)
        self.histogram(f.PARAMS_N).observe(params.n)
        if params.max_tokens is not None:
            self.histogram(f.PARAMS_MAX_TOKENS).observe(params.max_tokens)
        if times is None:
            return
        self.histogram(f.QUEUE).observe(times.queue_s)
        self.histogram(f.PREFILL).observe(times.ttft_s - times.queue_s)
        self.histogram(f.DECODE).observe(times.e2e_s - times.ttft_s)
        self.histogram(f.INFERENCE).observe(times.e2e_s - times.queue_s)

    def metrics(self, model_name: str) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        yield number(f.PROMPT_TOKENS, model_name, self.num_prompt_tokens)
        yield number(f.IMAGES, model_name, self.num_images)
        yield number(f.IMAGE_TOKENS, model_name, self.num_image_tokens)
        yield number(f.GENERATION_TOKENS, model_name, self.num_generation_tokens)
        yield samples(f.SUCCESS, model_name, [((reason,), count) for reason, count in self.ends.items()])
        for family, one in self._histograms.items():
            yield histograms(family, model_name, [((), one.bounds, one.counts, one.total)])


class HttpFigures:
    """Totals of HTTP exchanges since the start, by route."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(f.HTTP_SECONDS.buckets or ()))
        self._fine_seconds = Histogram(f.HTTP_FINE_SECONDS.buckets or ())
        self._request_bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._response_bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def observe(
        self, handler: str, method: str, status: int, *, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count an exchange that has ended; ``handler`` is the route's path."""
        self._requests[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method].observe(seconds)
        self._fine_seconds.observe(seconds)
        for sizes, size in ((self._request_bytes, request_bytes), (self._response_bytes, response_bytes)):
            sizes[handler][0] += 1
            sizes[handler][1] += size

    def metrics(self, model_name: str) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        yield samples(f.HTTP_REQUESTS, model_name, self._requests.items())
        by_route = [(labels, one.bounds, one.counts, one.total) for labels, one in self._seconds.items()]
        yield histograms(f.HTTP_SECONDS, model_name, by_route)
        fine = self._fine_seconds
        yield histograms(f.HTTP_FINE_SECONDS, model_name, [((), fine.bounds, fine.counts, fine.total)])
        for family, sizes in (
            (f.HTTP_REQUEST_BYTES, self._request_bytes),
            (f.HTTP_RESPONSE_BYTES, self._response_bytes),
        ):
            yield samples(family, model_name, [((handler,), count, total) for handler, (count, total) in sizes.items()])


class BatchFigures:
    """Stored batches, by id, and the lines that have ended since the start."""

    def __init__(self) -> None:
        self.stored: Mapping[str, Batch] = {}
        self._ends = Counter({"completed": 0, "failed": 0})

    def count(self, *, completed: int = 0, failed: int = 0) -> None:
        """Count lines that have ended with an answer or with an error."""
        self._ends.update(completed=completed, failed=failed)

    def metrics(self, model_name: str) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        batches = list(self.stored.values())
        states = Counter(batch.status for batch in batches)
        active = [batch.request_counts for batch in batches if batch.is_active]
        yield samples(f.BATCHES, model_name, [((state,), states[state]) for state in (*ACTIVE, *ENDED)])
        yield samples(f.BATCH_LINES, model_name, [((result,), count) for result, count in self._ends.items()])
        yield number(f.BATCH_LINES_WAITING, model_name, sum(one.total - one.completed - one.failed for one in active))


class Histogram:
    """Counts of values by bucket; ``bounds`` are the buckets' inclusive upper ends, of which the last has none."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Observe the same value, ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
