"""Counters and histograms of one thread: an observation is a bisection and two additions, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

from tp_engine.server.metrics.families import PREFIX, Family


class Histogram:
    """Values by bucket; ``bounds`` are the buckets' upper ends, included; a last bucket has none."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` times the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


def empty(family: Family) -> Metric:
    """The family without samples; ``add_metric`` takes label values, ``model_name`` before the others."""
    name, labels = PREFIX + family.name, ("model_name", *family.labels)
    match family.kind:
        case "counter":
            return CounterMetricFamily(name, family.text, labels=labels)
        case "gauge":
            return GaugeMetricFamily(name, family.text, labels=labels)
        case "summary":
            return SummaryMetricFamily(name, family.text, labels=labels)
        case _:
            return HistogramMetricFamily(name, family.text, labels=labels)


def numbers(family: Family, model_name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A counter or a gauge with its samples, pairs of label values and number."""
    metric = empty(family)
    assert isinstance(metric, (CounterMetricFamily, GaugeMetricFamily))
    for labels, value in values:
        metric.add_metric((model_name, *labels), value)
    return metric


def number(family: Family, model_name: str, value: float) -> Metric:
    """A counter or a gauge of one number."""
    return numbers(family, model_name, [((), value)])


def summaries(family: Family, model_name: str, values: Iterable[tuple[tuple[str, ...], int, float]]) -> Metric:
    """A summary with its samples: label values, count, sum."""
    metric = empty(family)
    assert isinstance(metric, SummaryMetricFamily)
    for labels, count, total in values:
        metric.add_metric((model_name, *labels), count, total)
    return metric


def histograms(
    family: Family,
    model_name: str,
    values: Iterable[tuple[tuple[str, ...], Sequence[float], Sequence[int], float]],
) -> Metric:
    """A histogram with its samples: label values, bounds, counts by bucket, sum."""
    metric = empty(family)
    assert isinstance(metric, HistogramMetricFamily)
    for labels, bounds, counts, total in values:
        running, buckets = 0, []
        for bound, count in zip((*map(float, bounds), float("inf")), counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), running))
        metric.add_metric((model_name, *labels), buckets, total)
    return metric
