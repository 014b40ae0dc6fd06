"""What acts on the engine rather than asking it for text."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from tp_engine.api.openai.protocol import parse_body
from tp_engine.engine.messages import Action
from tp_engine.errors import RequestError
from tp_engine.server.guards import read_body
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.replies import json_reply
from tp_engine.server.server_info import public_fields, versions
from tp_engine.server.state import ServerState

_QUICK_S = 10.0


class AbortBody(BaseModel):
    """``POST /abort``: which requests, by the ids of their answers or by their own; or all."""

    model_config = ConfigDict(strict=True, extra="allow")

    request_ids: list[str] | None = None
    abort_all: bool | None = None


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/abort``, ``/reset_prefix_cache``, ``/start_profile``, ``/stop_profile`` and ``/server_info``."""

    @app.post("/abort", **takes(AbortBody))
    async def abort(request: Request) -> Response:
        """End requests; what they have generated is answered with the finish reason ``abort``."""
        body = parse_body(AbortBody, await read_body(request, state.config))
        if (body.request_ids is None) == (not body.abort_all):
            raise RequestError("give either request_ids or abort_all true", param="request_ids")
        named = (engine_id for name in body.request_ids or () for engine_id in state.running.of(name))
        engine_ids = state.running.all() if body.abort_all else list(named)
        for engine_id in engine_ids:
            await state.llm.abort(engine_id)
        return json_reply({"num_aborted": len(engine_ids)})

    @app.post("/reset_prefix_cache", responses=ANSWERS)
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes; 400 while requests run."""
        return json_reply(await state.llm.act(Action.RESET_PREFIX_CACHE, timeout_s=_QUICK_S))

    @app.post("/start_profile", responses=ANSWERS)
    async def start_profile() -> Response:
        """Record the steps of all ranks from now on, into the folder of ``--profile``."""
        return json_reply(await state.llm.act(Action.START_PROFILE))

    @app.post("/stop_profile", responses=ANSWERS)
    async def stop_profile() -> Response:
        """End the record; the answer comes when every rank has written its trace."""
        return json_reply(await state.llm.act(Action.STOP_PROFILE))

    @app.get("/server_info", responses=ANSWERS)
    async def server_info() -> Response:
        """The effective configuration, each rank's memory, and versions; secrets are hidden."""
        engine = await state.llm.act(Action.DESCRIBE, timeout_s=_QUICK_S)
        report = await state.llm.report(timeout_s=_QUICK_S)
        memory = [{"rank": rank.rank, **rank.memory} for rank in report.ranks]
        return json_reply(
            {"engine": engine, "server": public_fields(state.config), "memory_bytes": memory, "versions": versions()}
        )
