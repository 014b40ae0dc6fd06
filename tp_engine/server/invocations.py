"""``/invocations``, the one route by which Amazon SageMaker sends all requests; ``/ping`` is its health check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from tp_engine.api.openai.pooled import EmbeddingBody, RerankBody, ScoreBody
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.errors import RequestError
from tp_engine.server.bodies import parsed, read_data
from tp_engine.server.generation import answer_body
from tp_engine.server.openapi import ANSWERS
from tp_engine.server.pooling_routes import answer_pooled
from tp_engine.server.state import ServerState

# The field that only one kind of body has -> the body, and what answers it; the first one that a body has counts.
_KINDS: dict[str, tuple[type[BaseModel], Callable[[ServerState, Request, Any], Awaitable[Response]]]] = {
    "messages": (ChatBody, answer_body),
    "prompt": (CompletionBody, answer_body),
    "input": (EmbeddingBody, answer_pooled),
    "query": (RerankBody, answer_pooled),
    "queries": (ScoreBody, answer_pooled),
    "text_1": (ScoreBody, answer_pooled),
}


def add_invocations(app: FastAPI, state: ServerState) -> None:
    """The route."""

    @app.post("/invocations", responses=ANSWERS)
    async def invocations(request: Request) -> Response:
        """A chat, a completion, embeddings, scores or a rank, by the fields of the body."""
        state.check_room()
        data = await read_data(request, state.config)
        try:
            names = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is not a JSON object: {error}") from None
        for name, (kind, answer) in _KINDS.items():
            if name in names:
                return await answer(state, request, await parsed(kind, data, request, state))
        raise RequestError(
            f"the body has none of the fields that tell what it asks for: {', '.join(_KINDS)}; give one of them"
        )
