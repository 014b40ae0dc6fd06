"""Whether the process lives, the engine is healthy, and a request would be served; what the server is, how busy."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine import __version__
from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/live``, ``/health``, ``/ping``, ``/ready``, ``/version`` and ``/load``."""

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
