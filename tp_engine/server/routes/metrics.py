"""What Prometheus scrapes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import EngineDeadError
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/metrics``."""

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Counters, gauges and histograms; those of the engine are missing while it does not answer."""
        try:
            report = await state.watch.report()
        except (HttpError, EngineDeadError, TimeoutError):
            report = None
        text = state.metrics.exposition(report, state.watch.monitor.summary().peak_usage)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
