"""What a metric is: its name, meaning, labels and buckets; and the metrics that a feature makes of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and a number, for each sample."""


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``max_model_len``."""
    steps = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= max_model_len)


@dataclass(frozen=True, slots=True, eq=False)
class MetricFamily:
    """One metric.  ``kind`` is ``counter``, ``gauge``, ``histogram`` or ``summary`` (count and sum alone).

    ``buckets`` None: ``token_buckets`` makes them from the model's greatest length.
    """

    kind: str
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = ()

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """Return the upper bounds of the buckets."""
        return token_buckets(max_model_len) if self.buckets is None else self.buckets


@dataclass(frozen=True, slots=True, eq=False)
class FeatureMetric:
    """A metric, and how it is ``read`` from the feature's part of ``SchedulerStats``, and from all of these."""

    family: MetricFamily
    read: Callable[[Any, Any], Samples]


def counter(name: str, text: str, field: str) -> FeatureMetric:
    """Return the counter of one number: a field of the statistics."""
    return FeatureMetric(MetricFamily("counter", name, text), _reader(field))


def gauge(name: str, text: str, field: str) -> FeatureMetric:
    """Return the gauge of one number: a field of the statistics."""
    return FeatureMetric(MetricFamily("gauge", name, text), _reader(field))


def _reader(field: str) -> Callable[[Any, Any], Samples]:
    return lambda part, _stats: [((), getattr(part, field))]
