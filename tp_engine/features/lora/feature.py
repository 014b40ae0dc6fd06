"""LoRA: adapters that share the model's weights (docs/adapters.md)."""

import time
from typing import Any

from tp_engine.features.extension import Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples
from tp_engine.features.registry import Feature
from tp_engine.sched.lora import AdapterStats

STATS = Extension("lora", AdapterStats)


def _requests(adapters: AdapterStats, _stats: Any) -> Samples:
    yield (str(adapters.max_loras), ",".join(adapters.running), ",".join(adapters.waiting)), time.time()


FEATURE = Feature(
    name="lora",
    scheduler="tp_engine.sched.lora:make",
    stats=STATS,
    metrics=(
        FeatureMetric(
            MetricFamily(
                "gauge",
                "lora_requests_info",
                "the time; adapters with running rows, and those that wait for a slot, in labels",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            ),
            _requests,
        ),
    ),
)
