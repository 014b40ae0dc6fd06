"""What is served."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine.server.openapi import ANSWERS
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/v1/models`` and ``/v1/models/NAME``."""

    @app.get("/v1/models", responses=ANSWERS)
    async def models() -> Response:
        """The names under which the model is served."""
        return json_reply({"object": "list", "data": [_model_card(state, name) for name in state.model_names]})

    @app.get("/v1/models/{name:path}", responses=ANSWERS)
    async def model(name: str) -> Response:
        """One of the names; 404 for any other."""
        return json_reply(_model_card(state, state.model_name(name)))


def _model_card(state: ServerState, name: str) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": state.created, "owned_by": "tp_engine"}
    card |= {"root": state.model_names[0], "parent": None}
    if state.max_model_len is not None:
        card["max_model_len"] = state.max_model_len
    return card
