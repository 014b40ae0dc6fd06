"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport
from tp_engine.server.metrics.engine import cache_config, engine_metrics
from tp_engine.server.metrics.http import HttpFigures
from tp_engine.server.metrics.requests import RequestFigures


class ServerMetrics:
    """Figures of answers and exchanges, which the server counts, and the engine's own as of a report."""

    def __init__(self, model_name: str) -> None:
        self.requests = RequestFigures()
        self.http = HttpFigures()
        self._model_name = model_name
        self._info: ModelInfo | None = None

    def attach(self, info: ModelInfo) -> None:
        """The engine is ready; no request has been accepted before."""
        self._info = info
        self.requests.set_max_model_len(info.max_model_len)

    def exposition(self, report: EngineReport | None, peak_usage: float = 0.0) -> bytes:
        """The text that Prometheus scrapes; ``report`` is None where the engine does not answer.

        ``peak_usage``: the allocation monitor's largest share of used blocks, 0 to 1.
        """
        registry = CollectorRegistry()
        registry.register(_Metrics(self._metrics(report, peak_usage)))
        return generate_latest(registry)

    def _metrics(self, report: EngineReport | None, peak_usage: float) -> Iterator[Metric]:
        yield from self.requests.metrics(self._model_name)
        yield from self.http.metrics(self._model_name)
        if self._info is not None:
            yield cache_config(self._info, self._model_name)
        if report is not None:
            yield from engine_metrics(report, peak_usage, self._model_name)


class _Metrics(Collector):
    """What a registry asks for, once."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise the registry would collect to find out."""
        return []

    def collect(self) -> Iterable[Metric]:
        return self._metrics
