"""LoRA: adapters that share the model's weights (docs/adapters.md)."""

import time
from dataclasses import dataclass
from typing import Any

from tp_engine.features.extension import Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples
from tp_engine.features.registry import Feature
from tp_engine.ipc.plan_sections import ArraySection

LOADS = ArraySection("lora.loads", columns=2)
"""Pairs (generation, slot): from this step on the slot holds the adapter that the ranks have loaded under this number.
Slots are numbered from 1 on."""

ROWS = ArraySection("lora.rows", columns=2)
"""Pairs (row, slot): of the rows that are admitted, those with an adapter."""

DROPS = ArraySection("lora.drops")
"""Generations that the ranks forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """``max_loras`` adapters have a slot on the devices at once."""

    max_loras: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStats:
    """Names of adapters with running rows, and of those that wait for a slot, sorted; retired ones have none."""

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAdapter:
    """The adapter of a request, by name.  The scheduler enters the ``generation`` of what is loaded under that name: a
    number that no other load of any adapter has."""

    name: str
    generation: int = 0


ADAPTER = Extension("lora", AskedAdapter)
LIMITS = Extension("lora", AdapterSlots)
STATS = Extension("lora", AdapterStats)


def _requests(adapters: AdapterStats, _stats: Any) -> Samples:
    yield (str(adapters.max_loras), ",".join(adapters.running), ",".join(adapters.waiting)), time.time()


FEATURE = Feature(
    name="lora",
    sections=(LOADS, ROWS, DROPS),
    commands="tp_engine.features.lora.commands:commands",
    engine="tp_engine.features.lora.commands:open_adapters",
    scheduler="tp_engine.features.lora.scheduling:make",
    rank="tp_engine.features.lora.ranks:make",
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
