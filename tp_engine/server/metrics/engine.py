"""From the engine's report to metrics: scheduler, pool, steps, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import PLAN_BYTES, STEP_TIME_S, STEP_TOKENS, WAIT_S, Distribution, EngineReport, RankReport
from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.figures import histograms, number, numbers

_STATS = {
    f.RUNNING: "num_running",
    f.WAITING: "num_waiting",
    f.QUERIES: "num_prefix_query_tokens",
    f.HITS: "num_prefix_hit_tokens",
    f.PREEMPTIONS: "num_preemptions",
    f.RECOMPUTED: "num_recomputed_tokens",
    f.FREE_BLOCKS: "num_free_blocks",
    f.CACHED_BLOCKS: "num_cached_blocks",
    f.USED_BLOCKS: "num_used_blocks",
    f.LIVE_TOKENS: "num_live_tokens",
    f.FRAGMENTATION: "fragmentation",
}
_OF_RANK: dict[f.Family, Callable[[RankReport], float]] = {
    f.COLLECTIVE_TIME: lambda rank: rank.collective_s,
    f.RANK_STEPS: lambda rank: rank.num_steps,
    f.RANK_LAST: lambda rank: rank.num_last,
    f.RANK_CPU: lambda rank: rank.cpu_s,
    f.RANK_SILENCE: lambda rank: rank.heartbeat_age_s,
    f.RANK_RESIDENT: lambda rank: rank.resident_bytes,
}
_SPREAD_OF_RANK: dict[f.Family, tuple[tuple[float, ...], Callable[[RankReport], Distribution]]] = {
    f.PLAN_WAIT: (WAIT_S, lambda rank: rank.plan_wait),
    f.STEP_TIME: (STEP_TIME_S, lambda rank: rank.step_time),
    f.COLLECTIVE_WAIT: (WAIT_S, lambda rank: rank.collective_wait),
}


def engine_metrics(report: EngineReport, peak_usage: float, model_name: str) -> Iterator[Metric]:
    """``peak_usage`` is the allocation monitor's."""
    stats = report.stats
    for family, name in _STATS.items():
        yield number(family, model_name, getattr(stats, name))
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
    yield number(f.KV_USAGE, model_name, stats.num_used_blocks / max(1, num_blocks))
    yield number(f.PEAK_USAGE, model_name, peak_usage)
    yield number(f.MISSED, model_name, report.num_missed_steps)
    for family, bounds, spread in (
        (f.ITERATION_TOKENS, STEP_TOKENS, report.step_tokens),
        (f.PLAN_SIZE, PLAN_BYTES, report.plan_bytes),
        (f.STEP_SKEW, WAIT_S, report.step_skew),
    ):
        yield histograms(family, model_name, [((), bounds, spread.counts, spread.total)])
    yield from _rank_metrics(report.ranks, model_name)


def _rank_metrics(ranks: list[RankReport], model_name: str) -> Iterator[Metric]:
    for family, read in _OF_RANK.items():
        yield numbers(family, model_name, [((str(rank.rank),), read(rank)) for rank in ranks])
    for family, (bounds, spread_of) in _SPREAD_OF_RANK.items():
        spreads = [(rank, spread_of(rank)) for rank in ranks]
        yield histograms(
            family, model_name, [((str(rank.rank),), bounds, one.counts, one.total) for rank, one in spreads]
        )
    lines = [((str(rank.rank), line), size) for rank in ranks for line, size in rank.memory.items()]
    yield numbers(f.RANK_MEMORY, model_name, lines)
    phases = [((str(rank.rank), phase), taken_s) for rank in ranks for phase, taken_s in rank.startup_s.items()]
    yield numbers(f.STARTUP, model_name, phases)


def cache_config(info: ModelInfo, model_name: str) -> Metric:
    """The KV cache's settings as labels of a 1."""
    values = (
        info.block_size, info.num_blocks, info.max_model_len, info.max_num_seqs, info.dtype, info.device,
        info.tensor_parallel_size,
    )  # fmt: skip
    return numbers(f.CACHE_CONFIG, model_name, [(tuple(map(str, values)), 1)])
