"""What tests need of the KV tiers: their counts beside the scheduler's, and plans that move blocks."""

from collections.abc import Iterable
from typing import Any

from tp_engine.features.tiers.feature import STATS
from tp_engine.sched.view import SchedulerStats


def counts(stats: SchedulerStats, names: Iterable[str]) -> dict[str, int]:
    """The statistics with these names: the scheduler's own, or the tiers'."""
    return {name: getattr(stats if hasattr(stats, name) else STATS.of(stats), name) for name in names}


def moves(**sections: Any) -> dict[str, Any]:
    """A plan's ``extensions`` with these sections of the tiers: ``stores``, ``loads``, ``wait_load`` and so on."""
    return {f"tiers.{name}": value for name, value in sections.items()}
