"""Speculation: draft tokens, of which one step verifies several (docs/speculation.md)."""

from collections.abc import Callable
from typing import Any

from tp_engine.features.extension import Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples, counter
from tp_engine.features.registry import Feature
from tp_engine.sched.spec_decode.speculation import SpeculationCounters

COUNTERS = Extension("speculation", SpeculationCounters)


def _accepted_at(found: SpeculationCounters, _stats: Any) -> Samples:
    yield from (((str(place),), count) for place, count in enumerate(found.accepted_at))


def _of_sources(which: int) -> Callable[[SpeculationCounters, Any], Samples]:
    """Read a count of each source: 0 its draft tokens, 1 those that were right."""
    return lambda found, _stats: [((source,), counts[which]) for source, counts in found.by_source.items()]


FEATURE = Feature(
    name="speculation",
    scheduler="tp_engine.sched.spec_decode.speculation:make",
    stats=COUNTERS,
    metrics=(
        counter("spec_decode_num_drafts", "runs of draft tokens that a step verified", "num_drafts"),
        counter("spec_decode_num_draft_tokens", "draft tokens that a step verified", "num_draft_tokens"),
        counter("spec_decode_num_accepted_tokens", "draft tokens that were right", "num_accepted_tokens"),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_num_accepted_tokens_per_pos",
                "draft tokens that were right, by their place in the run",
                ("position",),
            ),
            _accepted_at,
        ),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_source_draft_tokens",
                "draft tokens that were verified, by their source",
                ("source",),
            ),
            _of_sources(0),
        ),
        FeatureMetric(
            MetricFamily(
                "counter",
                "spec_decode_source_accepted_tokens",
                "draft tokens that were right, by their source",
                ("source",),
            ),
            _of_sources(1),
        ),
    ),
)
