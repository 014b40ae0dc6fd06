"""LoRA: adapters that share the model's weights (docs/adapters.md)."""

from tp_engine.features.registry import Feature

FEATURE = Feature(name="lora", scheduler="tp_engine.sched.lora:make")
