"""Prometheus metrics of one server, in a registry of its own: what the server counts, and what the engine reports."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import (
    EXPERT_LOAD,
    PLAN_BYTES,
    STEP_TIME_S,
    STEP_TOKENS,
    WAIT_S,
    Distribution,
    EngineReport,
    RankReport,
)
from tp_engine.features.metric import MetricFamily
from tp_engine.features.registry import read_metrics
from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.families import histograms, number, prefixed, samples
from tp_engine.server.metrics.figures import BatchFigures, HttpFigures, RequestFigures
from tp_engine.system.version import __version__

_CACHE_SETTINGS = (
    "block_size", "num_blocks", "max_model_len", "max_num_seqs", "dtype", "device", "tensor_parallel_size",
)  # fmt: skip
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
_OF_RANK: dict[MetricFamily, Callable[[RankReport], float]] = {
    f.COLLECTIVE_TIME: lambda rank: rank.collective_s,
    f.RANK_STEPS: lambda rank: rank.num_steps,
    f.RANK_LAST: lambda rank: rank.num_last,
    f.RANK_CPU: lambda rank: rank.cpu_s,
    f.RANK_SILENCE: lambda rank: rank.heartbeat_age_s,
    f.RANK_RESIDENT: lambda rank: rank.resident_bytes,
}
_SPREAD_OF_RANK: dict[MetricFamily, tuple[tuple[float, ...], Callable[[RankReport], Distribution]]] = {
    f.PLAN_WAIT: (WAIT_S, lambda rank: rank.plan_wait),
    f.STEP_TIME: (STEP_TIME_S, lambda rank: rank.step_time),
    f.COLLECTIVE_WAIT: (WAIT_S, lambda rank: rank.collective_wait),
}


class ServerMetrics:
    """The figures of requests, HTTP exchanges and batches, and those of the engine as of a report."""

    def __init__(self, model_name: str, prefixes: Sequence[str] = ("tp_engine",)) -> None:
        self.requests = RequestFigures()
        self.http = HttpFigures()
        self.batches = BatchFigures()
        self._model_name = model_name
        self._prefixes = prefixes
        self._info: ModelInfo | None = None

    def attach(self, info: ModelInfo) -> None:
        """Take the description of the ready engine, before the first request."""
        self._info = info
        self.requests.set_max_model_len(info.max_model_len)

    def exposition(self, report: EngineReport | None, peak_usage: float = 0.0) -> bytes:
        """The text that Prometheus scrapes, all of it once per prefix.

        ``report`` is None if the engine does not answer.  ``peak_usage`` is ``EngineWatch``'s, 0 to 1.
        """
        metrics = list(self._metrics(report, peak_usage))
        named = [metric for prefix in self._prefixes for metric in prefixed(metrics, prefix)]
        registry: Any = SimpleNamespace(collect=lambda: named)  # all of one that the text needs
        return generate_latest(registry)

    def _metrics(self, report: EngineReport | None, peak_usage: float) -> Iterator[Metric]:
        yield from self.requests.metrics(self._model_name)
        yield from self.http.metrics(self._model_name)
        yield from self.batches.metrics(self._model_name)
        yield samples(f.BUILD, self._model_name, [((__version__,), 1)])
        if self._info is not None:
            labels = tuple(str(getattr(self._info, name)) for name in _CACHE_SETTINGS)
            yield samples(f.CACHE_CONFIG, self._model_name, [(labels, 1)])
        if report is not None:
            yield from _engine_metrics(report, peak_usage, self._model_name)


def _engine_metrics(report: EngineReport, peak_usage: float, model_name: str) -> Iterator[Metric]:
    """The scheduler, the pool, steps and ranks; ``peak_usage`` as for ``exposition``."""
    stats = report.stats
    for family, name in _STATS.items():
        yield number(family, model_name, getattr(stats, name))
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
    yield number(f.KV_USAGE, model_name, stats.num_used_blocks / max(1, num_blocks))
    yield number(f.PEAK_USAGE, model_name, peak_usage)
    for family, found in read_metrics(stats):
        yield samples(family, model_name, found)
    if report.encode_s is not None:
        yield number(f.ENCODE_SECONDS, model_name, report.encode_s)
    yield number(f.MISSED, model_name, report.num_missed_steps)
    for family, bounds, spread in (
        (f.ITERATION_TOKENS, STEP_TOKENS, report.step_tokens),
        (f.PLAN_SIZE, PLAN_BYTES, report.plan_bytes),
        (f.STEP_SKEW, WAIT_S, report.step_skew),
    ):
        yield histograms(family, model_name, [((), bounds, spread.counts, spread.total)])
    if (experts := report.experts) is not None:
        ends = ("-Inf", *map(str, EXPERT_LOAD), "+Inf")
        counts = zip(pairwise(ends), experts.num_experts, strict=True)
        yield samples(f.EXPERT_BALANCE, model_name, list(counts))
        yield number(f.EXPERT_LARGEST, model_name, experts.largest_load)
    if (moves := report.moves) is not None:
        yield samples(f.MOVED_BYTES, model_name, [(("store",), moves.stored_bytes), (("load",), moves.loaded_bytes)])
        yield samples(f.MOVE_SECONDS, model_name, [(("store",), moves.store_s), (("load",), moves.load_s)])
        yield number(f.MOVE_WAIT, model_name, moves.wait_s)
    if (disk := report.disk_moves) is not None:
        yield samples(f.DISK_BYTES, model_name, [(("read",), disk.read_bytes), (("write",), disk.written_bytes)])
        yield samples(f.DISK_SECONDS, model_name, [(("read",), disk.read_s), (("write",), disk.write_s)])
    yield from _rank_metrics(report.ranks, model_name)


def _rank_metrics(ranks: list[RankReport], model_name: str) -> Iterator[Metric]:
    for family, read in _OF_RANK.items():
        yield samples(family, model_name, [((str(rank.rank),), read(rank)) for rank in ranks])
    for family, (bounds, spread_of) in _SPREAD_OF_RANK.items():
        spreads = [(rank, spread_of(rank)) for rank in ranks]
        yield histograms(
            family, model_name, [((str(rank.rank),), bounds, one.counts, one.total) for rank, one in spreads]
        )
    lines = [((str(rank.rank), line), size) for rank in ranks for line, size in rank.memory.items()]
    yield samples(f.RANK_MEMORY, model_name, lines)
    phases = [((str(rank.rank), phase), taken_s) for rank in ranks for phase, taken_s in rank.startup_s.items()]
    yield samples(f.STARTUP, model_name, phases)
