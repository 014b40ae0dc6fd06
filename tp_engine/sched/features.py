"""The scheduler's optional features, and how each is made."""

from collections.abc import Iterable, Iterator

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
from tp_engine.sched.tiers.prefetch import Prefetcher
from tp_engine.sched.tiers.tier_waits import DiskWaits, TierLoads


def make_features(
    state: SchedulerState,
    builder: StepScheduler,
    stops: StopChecker,
    fill_masks: FillMasks | None,
    proposers: Iterable[Proposer] | None,
    kv_events: KVEventSink | None,
) -> Iterator[SchedulerFeature]:
    """Make the features that the limits ask for, in the order in which their hooks are called.

    Tokens of a new request have their names before others see them; loads that are brought forward come before draft
    tokens.  ``proposers`` replace those of the configuration, for tests; ``kv_events`` takes the changes of the prefix
    cache.
    """
    limits, tier = state.limits, state.blocks.tier
    adapters = LoRASlots(limits.max_loras) if limits.max_loras else None
    if adapters is not None:
        yield adapters
    if limits.images is not None:
        yield Images(state, limits.images)
    if tier is not None:
        waits = None if tier.disk is None else DiskWaits(state, tier, tier.disk)
        if waits is not None:
            yield waits
        yield TierLoads(state, tier, builder)
        yield Prefetcher(state, tier, waits)
    if limits.speculation is not None:
        yield Speculation(limits.speculation, state, stops, fill_masks, proposers)
    if kv_events is not None:
        yield KVEvents(state.blocks.cache, limits, kv_events, adapters)
