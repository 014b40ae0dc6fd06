"""Whether the server lives and takes requests, what it is, and how busy."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine import __version__
from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/health``, ``/ping``, ``/ready``, ``/version`` and ``/load``."""

    @app.get("/health", responses=ANSWERS)
    @app.get("/ping", responses=ANSWERS)
    @app.post("/ping", responses=ANSWERS)
    async def health() -> Response:
        """200 unless the engine has failed or hangs; an engine that still loads is healthy."""
        state.check_healthy()
        return json_reply({"status": "ok"})

    @app.get("/ready", responses=ANSWERS)
    async def ready() -> Response:
        """200 if a request that comes now would be served."""
        state.check_ready()
        return json_reply({"status": "ready"})

    @app.get("/version", responses=ANSWERS)
    async def version() -> Response:
        """The server's version."""
        return json_reply({"version": __version__})

    @app.get("/load", responses=ANSWERS)
    async def load() -> Response:
        """Prompts that are queued or running, and how many there may be."""
        return json_reply({"server_load": state.admission.num_prompts, "max_load": state.admission.max_num_prompts})
