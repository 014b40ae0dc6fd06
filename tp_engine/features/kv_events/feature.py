"""KV events: routers are told what the prefix cache holds (docs/kv_events.md)."""

from dataclasses import dataclass

from tp_engine.features.extension import Extension
from tp_engine.features.metric import counter
from tp_engine.features.registry import Feature


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventCounters:
    """Since the start: messages published, and changes of the cache that were lost because the queue was full."""

    num_batches: int = 0
    num_lost_changes: int = 0


COUNTERS = Extension("kv_events", KVEventCounters)

FEATURE = Feature(
    name="kv_events",
    engine="tp_engine.features.kv_events.publisher:open_publisher",
    scheduler="tp_engine.features.kv_events.scheduling:make",
    stats=COUNTERS,
    metrics=(
        counter("kv_event_batches", "messages of KV events that were published", "num_batches"),
        counter(
            "kv_events_lost_changes",
            "changes of the prefix cache that were not published as the queue was full",
            "num_lost_changes",
        ),
    ),
)
