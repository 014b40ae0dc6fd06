"""Speculation: draft tokens, of which one step verifies several (docs/speculation.md)."""

from tp_engine.features.registry import Feature

FEATURE = Feature(name="speculation", scheduler="tp_engine.sched.spec_decode.speculation:make")
