"""The JSON of ``GET /engine``: what the engine does now, and what it did in the last minutes."""

from __future__ import annotations

import time
from typing import Any

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import Distribution, EngineReport, RankReport
from tp_engine.sched.view import PoolGrid, RunningSequence
from tp_engine.server.engine_watch import INTERVAL_S, EngineWatch

JsonObject = dict[str, Any]


def engine_page(info: ModelInfo, name: str, report: EngineReport, watch: EngineWatch, num_samples: int) -> JsonObject:
    """``report`` has a view; the history's last ``num_samples`` are given.  docs/serving.md describes each field."""
    stats, view, now_s = report.stats, report.view, time.monotonic()
    assert view is not None
    return {
        "time": time.time(),
        "model": {"name": name, **_model(info)},
        "pool": {
            "free": stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "used": stats.num_used_blocks,
            "live_tokens": stats.num_live_tokens,
            "fragmentation": stats.fragmentation,
            "grid": _grid(view.grid),
        },
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "omitted": view.num_omitted,
            "shown": [_sequence(one, now_s) for one in view.running],
        },
        "totals": {
            "prefix_query_tokens": stats.num_prefix_query_tokens,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "steps_not_observed": report.num_missed_steps,
        },
        "ranks": [_rank(rank) for rank in report.ranks],
        "history": _history(watch, num_samples),
    }


def _model(info: ModelInfo) -> JsonObject:
    return {
        "tensor_parallel_size": info.tensor_parallel_size,
        "device": info.device,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "max_num_seqs": info.max_num_seqs,
        "max_model_len": info.max_model_len,
    }


def _grid(grid: PoolGrid) -> JsonObject:
    """``cells`` become base64 in JSON."""
    return {
        "num_blocks": grid.num_blocks,
        "blocks_per_cell": grid.blocks_per_cell,
        "num_cells": grid.num_cells,
        "states": ["free", "cached", "used", "shared"],
        "cells": grid.cells,
    }


def _sequence(one: RunningSequence, now_s: float) -> JsonObject:
    return {
        "id": one.request_id,
        "index": one.index,
        "phase": one.phase,
        "priority": one.priority,
        "age_s": max(0.0, now_s - one.arrival_s),
        "prompt_tokens": one.num_prompt_tokens,
        "output_tokens": one.num_output_tokens,
        "computed_tokens": one.num_computed_tokens,
        "cached_tokens": one.num_cached_tokens,
        "preemptions": one.num_preemptions,
        "num_blocks": one.num_blocks,
        "shared_blocks": one.num_shared_blocks,
        "blocks": one.blocks,
    }


def _rank(rank: RankReport) -> JsonObject:
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "state": rank.state,
        "steps": rank.num_steps,
        "began_last": rank.num_last,
        "cpu_s": rank.cpu_s,
        "heartbeat_age_s": rank.heartbeat_age_s,
        "resident_bytes": rank.resident_bytes,
        "memory": rank.memory,
        "mean_step_s": _mean(rank.step_time),
        "mean_plan_wait_s": _mean(rank.plan_wait),
        "mean_collective_wait_s": _mean(rank.collective_wait),
        "collective_s": rank.collective_s,
        "recent_step_s": rank.recent_step_s,
        "startup_s": rank.startup_s,
    }


def _mean(spread: Distribution) -> float:
    return spread.total / max(1, sum(spread.counts))


def _history(watch: EngineWatch, num_samples: int) -> JsonObject:
    """Columns of equal length, oldest sample first; ``age_s`` is each one's distance from now."""
    samples, now_s = list(watch.history)[-num_samples:] if num_samples else [], time.monotonic()
    return {
        "interval_s": INTERVAL_S,
        "age_s": [round(now_s - one.time_s, 3) for one in samples],
        "running": [one.num_running for one in samples],
        "waiting": [one.num_waiting for one in samples],
        "prompt_tokens_per_s": [round(one.prompt_tokens_per_s, 2) for one in samples],
        "generation_tokens_per_s": [round(one.generation_tokens_per_s, 2) for one in samples],
        "free": [one.stats.num_free_blocks for one in samples],
        "cached": [one.stats.num_cached_blocks for one in samples],
        "used": [one.stats.num_used_blocks for one in samples],
        "live_tokens": [one.stats.num_live_tokens for one in samples],
        "fragmentation": [round(one.stats.fragmentation, 4) for one in samples],
    }
