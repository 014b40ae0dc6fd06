"""The table of the scheduler's optional features, and how each is made."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tp_engine.hooks import find_feature
from tp_engine.sched.constraint import FillMasks
from tp_engine.sched.feature import SchedulerFeature
from tp_engine.sched.images import Images
from tp_engine.sched.kv_events import KVEvents, KVEventSink
from tp_engine.sched.lora import LoRASlots
from tp_engine.sched.outcome import StopChecker
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.spec_decode.proposer import Proposer
from tp_engine.sched.spec_decode.speculation import Speculation
from tp_engine.sched.step_scheduler import StepScheduler
from tp_engine.sched.tiers.disk_waits import DiskWaits
from tp_engine.sched.tiers.prefetch import Prefetcher
from tp_engine.sched.tiers.tier_loads import TierLoads


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """What features are made of.  ``proposers`` replace those of the configuration, for tests; ``kv_events`` takes
    the changes of the prefix cache; ``made`` are the features before this one in the table."""

    state: SchedulerState
    builder: StepScheduler
    stops: StopChecker
    fill_masks: FillMasks | None
    proposers: Iterable[Proposer] | None
    kv_events: KVEventSink | None = None
    made: list[SchedulerFeature] = field(default_factory=list)


def _adapters(parts: FeatureParts) -> SchedulerFeature | None:
    max_loras = parts.state.limits.max_loras
    return LoRASlots(max_loras) if max_loras else None


def _images(parts: FeatureParts) -> SchedulerFeature | None:
    limits = parts.state.limits.images
    return None if limits is None else Images(parts.state, limits)


def _disk_waits(parts: FeatureParts) -> SchedulerFeature | None:
    tier = parts.state.blocks.tier
    return None if tier is None or tier.disk is None else DiskWaits(parts.state, tier, tier.disk)


def _tier_loads(parts: FeatureParts) -> SchedulerFeature | None:
    tier = parts.state.blocks.tier
    return None if tier is None else TierLoads(parts.state, tier, parts.builder)


def _prefetcher(parts: FeatureParts) -> SchedulerFeature | None:
    tier = parts.state.blocks.tier
    return None if tier is None else Prefetcher(parts.state, tier, find_feature(parts.made, DiskWaits))


def _speculation(parts: FeatureParts) -> SchedulerFeature | None:
    config = parts.state.limits.speculation
    if config is None:
        return None
    return Speculation(config, parts.state, parts.stops, parts.fill_masks, parts.proposers)


def _kv_events(parts: FeatureParts) -> SchedulerFeature | None:
    if parts.kv_events is None:
        return None
    adapters = find_feature(parts.made, LoRASlots)
    return KVEvents(parts.state.blocks.cache, parts.state.limits, parts.kv_events, adapters)


# In the order in which their hooks are called: tokens of a new request have their names before others see them; loads
# that are brought forward come before draft tokens.
FEATURES: tuple[Callable[[FeatureParts], SchedulerFeature | None], ...] = (
    _adapters,
    _images,
    _disk_waits,
    _tier_loads,
    _prefetcher,
    _speculation,
    _kv_events,
)


def make_features(parts: FeatureParts) -> list[SchedulerFeature]:
    """Return the features that the limits ask for."""
    for make in FEATURES:
        if (feature := make(parts)) is not None:
            parts.made.append(feature)
    return parts.made
