"""The web page: the files of ``page/``, and ``GET /engine``, the live view of the engine that it shows."""

import html
import time
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import Distribution, EngineReport, RankReport
from tp_engine.errors import RequestError
from tp_engine.features.speculation.feature import COUNTERS, SpeculationCounters
from tp_engine.features.tiers.feature import STATS, TierStats
from tp_engine.sched.view import PoolGrid, RunningSequence, SchedulerStats
from tp_engine.server.access import current_caller
from tp_engine.server.engine_watch import INTERVAL_S, MAX_SAMPLES, EngineWatch
from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState

JsonObject = dict[str, Any]

_FOLDER = resources.files("tp_engine.server") / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page asks this server alone, shows what its user pastes, runs nothing inline, and may not be framed by others.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'self'; object-src 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_HEAD = "<head>\n"

INDEX = "index.html"
ASSETS = tuple(sorted(file.name for file in _FOLDER.iterdir() if file.name != INDEX))

_MODEL_FIELDS = (
    "tensor_parallel_size", "device", "dtype", "block_size", "num_blocks", "max_num_seqs", "max_model_len",
)  # fmt: skip
_DEFAULT_SAMPLES = 300
_SAMPLES = {
    "name": "samples",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_SAMPLES, "default": _DEFAULT_SAMPLES},
}


def add_web_page(app: FastAPI, state: ServerState) -> None:
    """Add ``/`` and its files under ``/page/``, which need no key; and ``/engine``, which does."""

    @app.get("/engine", responses=ANSWERS, openapi_extra={"parameters": [_SAMPLES]})
    async def engine(request: Request) -> Response:
        """The KV pool, running requests with their block tables, every rank, and the last ``samples`` seconds."""
        text = request.query_params.get("samples", str(_DEFAULT_SAMPLES))
        if not (text.isdecimal() and len(text) < 6 and int(text) <= MAX_SAMPLES):
            raise RequestError(f"samples is {text[:50]!r}; it must be from 0 to {MAX_SAMPLES}", param="samples")
        info = state.llm.model_info
        try:
            report = await state.watch.view()
        except TimeoutError as error:
            raise HttpError(503, f"the engine does not answer: {error}", code="engine_hangs") from error
        page = _engine_json(info, state.model_names[0], report, state.watch, int(text))
        if not current_caller().sees_all:
            page["requests"] |= {"omitted": report.stats.num_running, "shown": []}
        return json_reply(page)

    @app.get("/", responses={200: {"content": {"text/html": {}}}})
    async def index() -> Response:
        """The web page."""
        return _page_reply(INDEX, state.config.root_path)

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HttpError(404, f"the page has no file {name[:80]!r}", code="not_found")
        return _page_reply(name)


def _page_reply(name: str, root_path: str = "") -> Response:
    """The file ``name``, one of ``ASSETS`` or ``INDEX``; the links of the index begin with ``root_path``."""
    text = _text(name)
    if name == INDEX and root_path:
        text = text.replace(_HEAD, f'{_HEAD}    <base href="{html.escape(root_path)}/" />\n', 1)
    return Response(text, headers=_HEADERS | {"Content-Type": _TYPES[name[name.rindex(".") :]]})


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _engine_json(info: ModelInfo, name: str, report: EngineReport, watch: EngineWatch, num_samples: int) -> JsonObject:
    """Needs a ``report`` with a view; holds the history's last ``num_samples``.  For the fields see docs/metrics.md."""
    stats, view, now_s = report.stats, report.view, time.monotonic()
    below = STATS.get(stats) or TierStats()
    assert view is not None
    return {
        "time": time.time(),
        "model": {"name": name, **{field: getattr(info, field) for field in _MODEL_FIELDS}},
        "pool": {
            "free": stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "used": stats.num_used_blocks,
            "live_tokens": stats.num_live_tokens,
            "fragmentation": stats.fragmentation,
            "grid": _grid(view.grid),
        },
        "tiers": tiers(stats),
        "speculation": None if (drafts := COUNTERS.get(stats)) is None else speculation(drafts),
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "omitted": view.num_omitted,
            "shown": [_sequence(one, now_s) for one in view.running],
        },
        "totals": {
            "prefix_query_tokens": stats.num_prefix_query_tokens,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "host_hit_tokens": below.num_host_hit_tokens,
            "disk_hit_tokens": below.num_disk_hit_tokens,
            "preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "step_samples_dropped": report.num_missed_steps,
        },
        "ranks": [_rank(rank) for rank in report.ranks],
        "history": _history(watch, num_samples),
    }


def tiers(stats: SchedulerStats) -> JsonObject:
    """The tiers below the pool: how many blocks each can hold, and holds; None for a missing one."""
    found = STATS.get(stats) or TierStats()
    host = {"slots": found.num_host_slots, "used": found.num_used_host_slots}
    disk = {"slots": found.num_disk_slots, "used": found.num_used_disk_slots}
    return {"host": host if host["slots"] else None, "disk": disk if disk["slots"] else None}


def speculation(found: SpeculationCounters) -> JsonObject:
    """Draft tokens since the start; a run is the draft tokens of one request in one step."""
    return {
        "runs": found.num_drafts,
        "drafted": found.num_draft_tokens,
        "right": found.num_accepted_tokens,
        "sources": {name: {"drafted": n, "right": right} for name, (n, right) in found.by_source.items() if n},
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
        "host": rank.host,
        "host_name": rank.host_name,
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
    """Columns of equal length, oldest sample first; ``age_s`` is the age of each."""
    samples, now_s = list(watch.history)[-num_samples:] if num_samples else [], time.monotonic()
    return {
        "interval_s": INTERVAL_S,
        "age_s": [round(now_s - one.time_s, 3) for one in samples],
        "running": [one.stats.num_running for one in samples],
        "waiting": [one.stats.num_waiting for one in samples],
        "prompt_tokens_per_s": [round(one.prompt_tokens_per_s, 2) for one in samples],
        "generation_tokens_per_s": [round(one.generation_tokens_per_s, 2) for one in samples],
        "free": [one.stats.num_free_blocks for one in samples],
        "cached": [one.stats.num_cached_blocks for one in samples],
        "used": [one.stats.num_used_blocks for one in samples],
        "live_tokens": [one.stats.num_live_tokens for one in samples],
        "fragmentation": [round(one.stats.fragmentation, 4) for one in samples],
    }
