"""KV tiers: blocks of the cache on the host and on disk (docs/tiers.md)."""

from tp_engine.features.registry import Feature

FEATURE = Feature(name="tiers", scheduler="tp_engine.sched.tiers.prefetch:make")
