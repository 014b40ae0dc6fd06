"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tp_engine.sched.stats import SchedulerStats

PREFIX = "tp_engine:"
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5)
_REQUEST_S = (0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800)

_GAUGES = {
    "num_running": ("num_requests_running", "requests in the running batch"),
    "num_waiting": ("num_requests_waiting", "requests that wait for a place in the batch"),
    "num_free_blocks": ("num_free_blocks", "KV blocks that hold nothing"),
    "num_cached_blocks": ("num_cached_blocks", "KV blocks that hold only cached prefixes"),
    "num_used_blocks": ("num_used_blocks", "KV blocks of running requests"),
    "fragmentation": ("kv_fragmentation", "share of the used blocks' slots that holds no token"),
}
_COUNTERS = {
    "num_prefix_query_tokens": ("prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "num_prefix_hit_tokens": ("prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "num_preemptions": ("num_preemptions", "preemptions of running requests"),
    "num_recomputed_tokens": ("recomputed_tokens", "tokens computed again after a preemption"),
}


class ServerMetrics:
    """Counters and histograms of answers, and the engine's own figures as of the last ``engine_stats``."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._engine = _EngineFigures(self._labels)
        self._registry.register(self._engine)
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of accepted requests")
        self._generation_tokens = self._counter("generation_tokens", "tokens generated")
        self._first_token = self._histogram("time_to_first_token_seconds", "arrival to first token", _FIRST_TOKEN_S)
        self._next_token = self._histogram("inter_token_latency_seconds", "between two tokens", _NEXT_TOKEN_S)
        self._request = self._histogram("e2e_request_latency_seconds", "arrival to last token", _REQUEST_S)
        self._success = Counter(
            PREFIX + "request_success", "finished sequences", ("model_name", "finished_reason"), registry=self._registry
        )

    def clock(self, num_prompt_tokens: int) -> AnswerClock:
        """Start timing one accepted prompt."""
        self._prompt_tokens.inc(num_prompt_tokens)
        return AnswerClock(self)

    def exposition(self, engine_stats: SchedulerStats | None) -> bytes:
        """The text that Prometheus scrapes; ``engine_stats`` is None where the engine does not answer."""
        self._engine.values = {} if engine_stats is None else dataclasses.asdict(engine_stats)
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)

    def observe_first(self, seconds: float) -> None:
        """The first token of a prompt came."""
        self._first_token.observe(seconds)

    def observe_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """``num_tokens`` came at once, ``seconds`` after those before them in the same sequence."""
        self._generation_tokens.inc(num_tokens)
        if seconds is not None:
            self._next_token.observe(seconds / num_tokens)

    def observe_end(self, reason: str, seconds: float) -> None:
        """A sequence ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._request.observe(seconds)


class AnswerClock:
    """Times one prompt's sequences."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start_s = time.monotonic()
        self._last_s: dict[int, float] = {}

    def tick(self, index: int, num_tokens: int, finish_reason: str | None) -> None:
        """Sequence ``index`` got ``num_tokens`` more, and perhaps ended."""
        now_s = time.monotonic()
        if num_tokens:
            if not self._last_s:
                self._metrics.observe_first(now_s - self._start_s)
            last_s = self._last_s.get(index)
            self._metrics.observe_tokens(num_tokens, None if last_s is None else now_s - last_s)
            self._last_s[index] = now_s
        if finish_reason is not None:
            self._metrics.observe_end(finish_reason, now_s - self._start_s)


class _EngineFigures(Collector):
    """The engine's own figures, as of the last scrape."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._texts = list(labels), list(labels.values())
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters for those figures that are known."""
        for key in self.values.keys() & _GAUGES.keys():
            yield self._gauge(*_GAUGES[key], self.values[key])
        for key in self.values.keys() & _COUNTERS.keys():
            name, text = _COUNTERS[key]
            counter = CounterMetricFamily(PREFIX + name, text, labels=self._names)
            counter.add_metric(self._texts, self.values[key])
            yield counter
        if "num_used_blocks" in self.values:
            used = self.values["num_used_blocks"]
            total = used + self.values["num_free_blocks"] + self.values["num_cached_blocks"]
            yield self._gauge("kv_cache_usage_perc", "share of the KV blocks in use, 0 to 1", used / max(1.0, total))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=self._names)
        gauge.add_metric(self._texts, value)
        return gauge
