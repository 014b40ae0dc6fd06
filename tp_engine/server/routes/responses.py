"""Responses."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.responses import answer_response
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/v1/responses``, and the answer to those who look for one that was stored."""

    @app.post("/v1/responses", **takes(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer text or a list of items with a list of items; nothing is stored."""
        return await answer_response(state, request)

    @app.get("/v1/responses/{response_id}", responses=ANSWERS)
    @app.delete("/v1/responses/{response_id}", responses=ANSWERS)
    async def stored_response(response_id: str) -> Response:
        """404: responses are not stored."""
        raise HttpError(
            404,
            f"there is no response {response_id[:80]!r}; this server stores none, keep the answer to your request",
            code="response_not_found",
        )
