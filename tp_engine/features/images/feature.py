"""Images in prompts: scheduling and encoding (docs/images.md)."""

from tp_engine.features.registry import Feature

FEATURE = Feature(name="images", scheduler="tp_engine.sched.images:make")
