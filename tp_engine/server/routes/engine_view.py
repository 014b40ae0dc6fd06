"""The engine as the web page shows it."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import RequestError
from tp_engine.server.engine_page import engine_page
from tp_engine.server.engine_watch import MAX_SAMPLES
from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState

_DEFAULT_SAMPLES = 300
_SAMPLES = {
    "name": "samples",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_SAMPLES, "default": _DEFAULT_SAMPLES},
}


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/engine``."""

    @app.get("/engine", responses=ANSWERS, openapi_extra={"parameters": [_SAMPLES]})
    async def engine(request: Request) -> Response:
        """The KV pool, running requests with their block tables, every rank, and the last ``samples`` seconds."""
        num_samples = _num_samples(request.query_params.get("samples"))
        info = state.llm.model_info
        try:
            report = await state.watch.view()
        except TimeoutError as error:
            raise HttpError(503, f"the engine does not answer: {error}", code="engine_hangs") from error
        return json_reply(engine_page(info, state.model_names[0], report, state.watch, num_samples))


def _num_samples(text: str | None) -> int:
    if text is None:
        return _DEFAULT_SAMPLES
    if text.isdecimal() and len(text) < 6 and int(text) <= MAX_SAMPLES:
        return int(text)
    raise RequestError(f"samples is {text[:50]!r}; it must be from 0 to {MAX_SAMPLES}", param="samples")
