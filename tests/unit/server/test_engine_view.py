"""``GET /engine``: its shape, its bounds and its guard; an idle engine gets no question."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine, arith
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.engine.report import EngineReport
from tp_engine.sched.view import ViewLimits
from tp_engine.server import engine_watch
from tp_engine.server.config import ServerConfig

SHAPE = {
    "": "history model pool ranks requests speculation tiers time totals",
    "model": "block_size device dtype max_model_len max_num_seqs name num_blocks tensor_parallel_size",
    "pool": "cached fragmentation free grid live_tokens used",
    "requests": "omitted running shown waiting",
    "tiers": "disk host",
    "speculation": "drafted right runs sources",
    "totals": "disk_hit_tokens host_hit_tokens preemptions prefix_hit_tokens prefix_query_tokens recomputed_tokens "
    "step_samples_dropped",
    "history": "age_s cached fragmentation free generation_tokens_per_s interval_s live_tokens prompt_tokens_per_s "
    "running used waiting",
}
GRID = "blocks_per_cell cells num_blocks num_cells states"
SHOWN = (
    "age_s blocks cached_tokens computed_tokens id index num_blocks output_tokens phase preemptions priority "
    "prompt_tokens shared_blocks"
)
RANK = (
    "began_last collective_s cpu_s heartbeat_age_s host host_name mean_collective_wait_s mean_plan_wait_s mean_step_s "
    "memory pid rank recent_step_s resident_bytes startup_s state steps"
)


class CountingEngine(FakeEngine):
    """Counts the questions that it gets."""

    num_reports = 0

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        self.num_reports += 1
        return super().report(view)


def served(
    scenario: Callable[[App], Awaitable[None]], engine: FakeEngine | None = None, config: ServerConfig | None = None
) -> None:
    run_served(scenario, engine or CountingEngine(arith, step_delay_s=0.002), byte_level_tokenizer(), config)


def keys(value: dict[str, Any]) -> str:
    return " ".join(sorted(value))


def body(**changes: object) -> dict[str, object]:
    return {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 900, "stream": True, **changes}


def test_the_shape_is_as_documented() -> None:
    """Oracle: the fields of docs/metrics.md; two sequences run and hold blocks 0 and 1 of the fake engine."""

    async def scenario(app: App) -> None:
        exchange = app.start("POST", "/v1/completions", body(n=2))
        await until(lambda: bool(exchange.parts), "the first event")
        page = (await app.get("/engine")).json()
        exchange.leave()
        await exchange.ended()
        for place, names in SHAPE.items():
            assert keys(page[place] if place else page) == names
        assert keys(page["pool"]["grid"]) == GRID
        assert [keys(one) for one in page["requests"]["shown"]] == [SHOWN] * 2
        assert [keys(rank) for rank in page["ranks"]] == [RANK] * 2
        cells = base64.b64decode(page["pool"]["grid"]["cells"])
        assert cells[0] == 0b1010 and not any(cells[1:]) and len(cells) == 64
        assert page["pool"]["grid"]["states"] == ["free", "cached", "used", "shared"]
        assert (page["requests"]["running"], page["requests"]["omitted"]) == (2, 0)
        assert [(one["index"], one["blocks"], one["prompt_tokens"]) for one in page["requests"]["shown"]] == [
            (0, [0], 3),
            (1, [1], 3),
        ]
        assert 0 <= page["requests"]["shown"][0]["age_s"] < 60 and len(page["requests"]["shown"][0]["id"]) <= 24
        assert page["tiers"] == {"host": {"slots": 12, "used": 3}, "disk": None}
        figures = {"drafted": 20, "right": 12}
        assert page["speculation"] == {"runs": 5, **figures, "sources": {"ngram": figures}}
        assert page["ranks"][0]["mean_step_s"] == pytest.approx(0.0005)
        history = page["history"]
        assert len({len(column) for name, column in history.items() if name != "interval_s"}) == 1
        assert history["running"] == [2] and history["used"] == [2]

    served(scenario)


def test_samples() -> None:
    """Oracle: as many as requested; the error for a number beyond the bounds names the field."""

    async def scenario(app: App) -> None:
        assert len((await app.get("/engine?samples=0")).json()["history"]["age_s"]) == 0
        assert len((await app.get("/engine")).json()["history"]["age_s"]) == 1
        for wrong in ("-1", "601", "x", "9" * 1000, ""):
            reply = await app.get(f"/engine?samples={wrong}")
            assert reply.status == 400 and reply.json()["error"]["param"] == "samples"

    served(scenario)


def test_however_many_look_the_engine_is_asked_once() -> None:
    """Oracle: the engine's count of questions; a client that leaves does not cost the others their answer."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, CountingEngine)
        leaving = app.start("GET", "/engine")
        replies = await asyncio.gather(*(app.get("/engine") for _ in range(20)))
        leaving.leave()
        await leaving.ended()
        assert engine.num_reports <= 2 and all(reply.status == 200 for reply in replies)

    served(scenario)


def test_the_api_key_guards_it() -> None:
    """Oracle: 401 without the key; the metrics stay open."""

    async def scenario(app: App) -> None:
        assert (await app.get("/engine")).status == 401
        assert (await app.start("GET", "/engine", authorization="Bearer k").reply()).status == 200
        assert (await app.get("/metrics")).status == 200

    served(scenario, config=ServerConfig(api_key=("k",)))


def test_a_dead_engine_is_a_503() -> None:
    """Oracle: status and code."""

    async def scenario(app: App) -> None:
        app.service.service.request_stop()
        await until(lambda: not app.state._llm.is_ready, "the end of the engine")  # type: ignore[union-attr]
        reply = await app.get("/engine")
        assert reply.status == 503

    served(scenario)


def test_an_idle_engine_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: samples continue while the engine's count of questions stands still; a second is shortened to a
    hundredth."""
    monkeypatch.setattr(engine_watch, "INTERVAL_S", 0.01)

    async def scenario(app: App) -> None:
        engine, watch = app.service.engine, app.state.watch
        assert isinstance(engine, CountingEngine)
        running = asyncio.create_task(watch.run())
        exchange = app.start("POST", "/v1/completions", body())
        await until(lambda: any(sample.generation_tokens_per_s for sample in watch.history), "a sample of the request")
        exchange.leave()
        await exchange.ended()
        await until(lambda: watch._is_idle(), "an idle sample")
        asked, kept = engine.num_reports, len(watch.history)
        await until(lambda: len(watch.history) > kept + 5, "more samples")
        assert engine.num_reports == asked
        running.cancel()
        total = sum(one.generation_tokens_per_s for one in watch.history)
        assert total > 0 and watch.history[-1].generation_tokens_per_s == 0
        assert 0 < watch.peak_usage <= 1

    served(scenario)


def test_the_line_on_throughput(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: one line while a request runs, none with disable_log_stats."""
    monkeypatch.setattr(engine_watch, "INTERVAL_S", 0.01)

    async def scenario(app: App) -> None:
        running = asyncio.create_task(app.state.watch.run())
        exchange = app.start("POST", "/v1/completions", body())
        await until(lambda: len(app.state.watch.history) > 5, "samples")
        exchange.leave()
        await exchange.ended()
        running.cancel()

    with caplog.at_level("INFO", "tp_engine"):
        served(scenario)
        lines = [record.getMessage() for record in caplog.records if "throughput" in record.getMessage()]
        assert len(lines) == 1 and "running: " in lines[0] and "KV cache usage: " in lines[0]
        caplog.clear()
        served(scenario, config=ServerConfig(disable_log_stats=True))
        assert not [record for record in caplog.records if "throughput" in record.getMessage()]
