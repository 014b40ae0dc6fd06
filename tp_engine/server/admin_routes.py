"""The routes for operators: health, load, metrics, and what acts on the engine."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import RequestBody
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.options.fields import plain
from tp_engine.server.access import current_caller
from tp_engine.server.bodies import read_body
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.query import SWITCH, query_choice
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState
from tp_engine.server.turns import SharedAnswer
from tp_engine.server.web_page import tiers
from tp_engine.system.version import __version__, installed_version

_QUICK_S = 10.0
_METRICS_INTERVAL_S = 0.1  # making the text blocks the event loop for milliseconds
MAX_ABORTED = 1 << 16  # names of one body
_PARTS = ("torch", "transformers", "tokenizers", "safetensors", "triton", "fastapi", "uvicorn", "pydantic")


class AbortBody(RequestBody):
    """``POST /abort``: the requests, by the ids of their answers or their own, or all."""

    request_ids: list[str] | None = Field(None, max_length=MAX_ABORTED)
    abort_all: bool | None = None


class PrefetchBody(RequestBody):
    """``POST /prefetch``: a session, by the fields that its requests have."""

    prompt_cache_key: str = Field(max_length=1024)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)


class LoadAdapterBody(RequestBody):
    """``POST /v1/load_lora_adapter``: a name for clients, and the adapter's folder, the same on every host."""

    lora_name: str = Field(min_length=1, max_length=1024)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapterBody(RequestBody):
    """``POST /v1/unload_lora_adapter``: the name of a loaded adapter."""

    lora_name: str = Field(min_length=1, max_length=1024)


def add_admin_routes(app: FastAPI, admin: APIRouter, state: ServerState) -> None:
    """Health (``/health``, ``/load``, ...), ``/metrics``, actions (``/abort``, ``/start_profile``, ...), adapters."""
    _add_status(app, state)
    _add_metrics(app, state)
    _add_requests(app, state)
    _add_description(app, state)
    _add_control(admin, state)
    _add_adapters(admin, state)


def _add_status(app: FastAPI, state: ServerState) -> None:
    @app.get("/live", responses=ANSWERS)
    async def live() -> Response:
        """200 as soon as HTTP is up, whatever the engine does."""
        return json_reply({"status": "live"})

    @app.get("/health", responses=ANSWERS)
    @app.get("/ping", responses=ANSWERS)
    @app.post("/ping", responses=ANSWERS)
    async def health() -> Response:
        """200 once the model is loaded, until the engine fails or hangs; 503 before and after."""
        state.healthy_llm()
        return json_reply({"status": "ok"})

    @app.get("/ready", responses=ANSWERS)
    async def ready() -> Response:
        """200 if a request would be served now."""
        state.check_ready()
        return json_reply({"status": "ready"})

    @app.get("/version", responses=ANSWERS)
    async def version() -> Response:
        """The server's version."""
        return json_reply({"version": __version__})

    @app.get("/load", responses=ANSWERS)
    async def load() -> Response:
        """Prompts that are queued or running, and how many there may be."""
        return json_reply({"server_load": state.limit.num_prompts, "max_load": state.limit.max_num_prompts})


def _add_metrics(app: FastAPI, state: ServerState) -> None:
    async def exposition() -> bytes:
        try:
            report = await state.watch.report()
        except (HttpError, EngineDeadError, TimeoutError):
            report = None
        return state.metrics.exposition(report, state.watch.peak_usage)

    shared = SharedAnswer(exposition, _METRICS_INTERVAL_S)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Counters, gauges and histograms; those of the engine are missing while it does not answer."""
        return Response(await shared.get(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_requests(app: FastAPI, state: ServerState) -> None:
    @app.post("/abort", **takes(AbortBody))
    @app.post("/abort_requests", **takes(AbortBody))
    async def abort(request: Request) -> Response:
        """End requests; what they have generated is answered with the finish reason ``abort``.

        A client's key reaches only the requests of that key; all other ids are unknown to it.
        """
        body = await read_body(AbortBody, request, state)
        if (body.request_ids is None) == (not body.abort_all):
            raise RequestError("give either request_ids or abort_all true", param="request_ids")
        caller = current_caller()
        if body.abort_all and caller.owner is None:
            caller.check_admin("abort_all")
        running = state.running
        engine_ids = running.all(caller) if body.abort_all else running.of(body.request_ids or (), caller)
        for engine_id in engine_ids:
            await state.llm.abort(engine_id)
        return json_reply({"num_aborted": len(engine_ids)})

    @app.post("/prefetch", **takes(PrefetchBody))
    async def prefetch(request: Request) -> Response:
        """Announce that a session will continue soon: its blocks are loaded back from the host tier."""
        body = await read_body(PrefetchBody, request, state)
        await state.llm.prefetch(body.prompt_cache_key, body.cache_salt)
        return json_reply({})


def _add_control(admin: APIRouter, state: ServerState) -> None:
    @admin.post("/reset_prefix_cache", responses=ANSWERS)
    async def reset_prefix_cache(request: Request) -> Response:
        """Forget all cached prefixes, also those in tiers; 400 while requests run, unless
        ``?reset_running_requests=true`` has them computed again."""
        given = {
            name: query_choice(request, name, SWITCH, "")
            for name in ("reset_running_requests", "reset_external")
            if name in request.query_params
        }
        return json_reply(await state.llm.engine.act("reset_prefix_cache", timeout_s=_QUICK_S, **given))

    @admin.post("/reset_mm_cache", responses=ANSWERS)
    async def reset_mm_cache() -> Response:
        """Forget all embeddings of images; running requests have theirs encoded again."""
        return json_reply(await state.llm.engine.act("reset_mm_cache", timeout_s=_QUICK_S))

    @admin.get("/debug/flight_record", responses=ANSWERS)
    async def flight_record() -> Response:
        """The flight record of the job as it is now; see What happened in step N?"""
        return json_reply(await state.llm.engine.act("flight_record"))

    @admin.post("/start_profile", responses=ANSWERS)
    async def start_profile() -> Response:
        """Record the steps of all ranks from now on, into the folder of ``--profile``."""
        return json_reply(await state.llm.engine.act("start_profile"))

    @admin.post("/stop_profile", responses=ANSWERS)
    async def stop_profile() -> Response:
        """End the recording; the answer comes when every rank has written its trace."""
        return json_reply(await state.llm.engine.act("stop_profile"))


def _add_description(app: FastAPI, state: ServerState) -> None:
    @app.get("/server_info", responses=ANSWERS)
    async def server_info(request: Request) -> Response:
        """The effective configuration, the tiers' slots, each rank's memory, and versions; secrets are hidden.

        The first three fields have SGLang's names: its router learns the model's name from them.  Clients' keys get
        these, the choices of kernels, and the versions.
        """
        query_choice(request, "config_format", {"json": None}, "json")
        model = state.llm.model_info
        named = {
            "served_model_name": state.model_names[0],
            "model_path": model.model,
            "tp_size": model.tensor_parallel_size,
            "kernel_choices": model.kernel_choices,
            "versions": {
                "tp_engine": __version__,
                "python": platform.python_version(),
                **{part: installed_version(part) for part in _PARTS},
            },
        }
        if not current_caller().sees_all:
            return json_reply(named)
        engine = await state.llm.engine.act("describe", timeout_s=_QUICK_S)
        report = await state.llm.report(timeout_s=_QUICK_S)
        return json_reply(
            {
                **named,
                "engine": engine,
                "server": public_fields(state.config),
                "tiers": tiers(report.stats),
                "memory_bytes": [{"rank": rank.rank, **rank.memory} for rank in report.ranks],
            }
        )


def _add_adapters(admin: APIRouter, state: ServerState) -> None:
    """With vLLM's bodies and answers."""

    @admin.post("/v1/load_lora_adapter", **takes(LoadAdapterBody))
    async def load(request: Request) -> Response:
        """Load an adapter, which may replace one of its name; 400, and nothing has changed, if it cannot be served."""
        body = await read_body(LoadAdapterBody, request, state)
        if body.lora_name in state.model_names:
            raise RequestError(f"{body.lora_name!r} names the model; give the adapter another name", param="lora_name")
        if state.llm.model_info.enable_lora:
            state.model_dirs.check(body.lora_path, "lora_path")
        await state.llm.load_lora_adapter(body.lora_name, body.lora_path, load_inplace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @admin.post("/v1/unload_lora_adapter", **takes(UnloadAdapterBody))
    async def unload(request: Request) -> Response:
        """Unload an adapter, which ends the requests that use it; 404 for an unknown name."""
        body = await read_body(UnloadAdapterBody, request, state)
        if state.llm.model_info.enable_lora and body.lora_name not in state.adapters:
            raise RequestError(
                f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name", code="model_not_found"
            )
        await state.llm.unload_lora_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def public_fields(config: Any) -> dict[str, Any]:
    """A configuration by field; a secret shows only whether it is set."""
    fields = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        fields[spec.name] = ("hidden" if value else None) if spec.metadata.get("secret") else plain(value)
    return fields
