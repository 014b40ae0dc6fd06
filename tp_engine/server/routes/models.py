"""What is served."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/v1/models`` and ``/v1/models/NAME``; 503 where ``/health`` is: clients take a listed model for served."""

    @app.get("/v1/models", responses=ANSWERS)
    async def models() -> Response:
        """The names under which the model is served."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        cards = [_model_card(state, name, max_model_len) for name in state.model_names]
        return json_reply({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", responses=ANSWERS)
    async def model(name: str) -> Response:
        """One of the names; 404 for any other."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        return json_reply(_model_card(state, state.model_name(name), max_model_len))


def _model_card(state: ServerState, name: str, max_model_len: int) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": state.created, "owned_by": "tp_engine"}
    return card | {"root": state.model_names[0], "parent": None, "max_model_len": max_model_len}
