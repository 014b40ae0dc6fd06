"""KV tiers: cached blocks go to host memory and to disk, and come back when a prompt needs them (docs/tiers.md)."""

from dataclasses import dataclass

from tp_engine.features.extension import Extension
from tp_engine.features.metric import FeatureMetric, MetricFamily, Samples, counter
from tp_engine.features.registry import Feature
from tp_engine.ipc.plan_sections import ArraySection, NumberSection
from tp_engine.sched.view import SchedulerStats

NEVER = -(1 << 60)
"""A step long ago."""

STORES = ArraySection("tiers.stores", columns=2)
LOADS = ArraySection("tiers.loads", columns=2)
DISK_READS = ArraySection("tiers.disk_reads", columns=2)
DISK_WRITES = ArraySection("tiers.disk_writes", columns=2)
WAIT_LOAD = NumberSection("tiers.wait_load")
"""*Moves* are copies between the pool and the slots of the host tier, numbered from 0: a store is a pair (block, slot),
a load a pair (slot, block).  They may run beside forward passes, in the order of the plans.  Those of one plan are a
*batch*; batches are numbered from 1 on by the plans that have any.  A move begins after the forward passes of all plans
before its own; none writes what a copy of its own plan reads.  ``wait_load`` is the number of a batch: copies and
forward pass of this plan begin when the moves of all batches up to it have ended; 0 waits for none.

Disk reads are pairs (slot on disk, slot of the host tier), disk writes pairs (slot of the host tier, slot on disk).
They begin when the moves of this plan have ended, and no step waits for them: the reads of all plans end in their
order, so do the writes, and ranks report how far they are (``tier_progress``).  Until then no plan uses their slots
otherwise."""


SECTIONS = frozenset(one.name for one in (STORES, LOADS, DISK_READS, DISK_WRITES, WAIT_LOAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """``num_host_slots`` blocks fit into the host tier and ``num_disk_slots`` on disk, 0 without such a tier; a plan
    moves at most ``max_host_moves`` blocks each way, unless nothing else can run.  With ``checks_stores`` a block on
    the host is used only after all ranks have reported that they have it; there is no disk then."""

    num_host_slots: int = 0
    num_disk_slots: int = 0
    max_host_moves: int = 64
    checks_stores: bool = False


@dataclass(slots=True, kw_only=True)
class TierWait:
    """What a waiting sequence, or one that is expected, has of the tiers.

    The host tier was searched for it at ``looked_at_step``, and ``num_prefetched_tokens`` were loaded.  It has waited
    ``num_disk_waits`` times in vain for the disk tier, which had ``num_unread_blocks`` of its prefix when it last
    looked; ``num_read_blocks`` were read for it, and it takes hits there if it ``reads_disk``.
    """

    looked_at_step: int = NEVER
    num_prefetched_tokens: int = 0
    num_disk_waits: int = 0
    num_read_blocks: int = 0
    num_unread_blocks: int = 0
    reads_disk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Of the host tier: its slots, those that hold a block, hit tokens (a part of the prefix hits) that came from
    there, and blocks moved each way, refused by a codec, or given up without a copy.  Of the disk tier the same, and
    blocks whose read or write failed on some rank."""

    num_host_slots: int = 0
    num_used_host_slots: int = 0
    num_host_hit_tokens: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_dropped_blocks: int = 0
    num_refused_blocks: int = 0
    num_disk_slots: int = 0
    num_used_disk_slots: int = 0
    num_disk_hit_tokens: int = 0
    num_disk_written_blocks: int = 0
    num_disk_read_blocks: int = 0
    num_disk_failed_blocks: int = 0


LIMITS = Extension("tiers", TierLimits)
WAIT = Extension("tiers", TierWait)
STATS = Extension("tiers", TierStats)


def _sources(tiers: TierStats, stats: SchedulerStats) -> Samples:
    """Where the tokens of prompts came from."""
    on_host, on_disk, hits = tiers.num_host_hit_tokens, tiers.num_disk_hit_tokens, stats.num_prefix_hit_tokens
    yield ("device",), hits - on_host - on_disk
    yield ("host",), on_host
    yield ("disk",), on_disk
    yield ("computed",), stats.num_prefix_query_tokens - hits


def _host_usage(tiers: TierStats, stats: SchedulerStats) -> Samples:
    yield (), tiers.num_used_host_slots / max(1, tiers.num_host_slots)


def _disk_usage(tiers: TierStats, stats: SchedulerStats) -> Samples:
    yield (), tiers.num_used_disk_slots / max(1, tiers.num_disk_slots)


METRICS = (
    FeatureMetric(
        MetricFamily(
            "counter",
            "prompt_tokens_by_source",
            "prompt tokens: found on the device, on the host, on disk, or computed",
            ("source",),
        ),
        _sources,
    ),
    FeatureMetric(
        MetricFamily("gauge", "kv_host_usage_perc", "share of the host tier's slots that hold a KV block, 0 to 1"),
        _host_usage,
    ),
    FeatureMetric(
        MetricFamily("gauge", "kv_disk_usage_perc", "share of the disk tier's slots that hold a KV block, 0 to 1"),
        _disk_usage,
    ),
    counter("kv_dropped_blocks", "cached KV blocks evicted without a copy in the host tier", "num_dropped_blocks"),
    counter(
        "kv_refused_blocks",
        "KV blocks that the host tier's codec refused, being beyond its bound on the error",
        "num_refused_blocks",
    ),
    counter(
        "kv_disk_failed_blocks",
        "KV blocks that some rank could not write to disk, or read as it wrote them",
        "num_disk_failed_blocks",
    ),
)

FEATURE = Feature(
    name="tiers",
    sections=(STORES, LOADS, DISK_READS, DISK_WRITES, WAIT_LOAD),
    rank="tp_engine.features.tiers.ranks:make",
    check="tp_engine.features.tiers.checks:check",
    engine="tp_engine.features.tiers.disk_writer:open_tiers",
    scheduler="tp_engine.features.tiers.scheduling:make",
    stats=STATS,
    metrics=METRICS,
    tells_zeros=True,
)
