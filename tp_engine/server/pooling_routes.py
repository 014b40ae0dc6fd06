"""The routes of embeddings, scores and ranks."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.pooled import (
    AnyPooledBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    num_pooled,
    prepare_pooled,
)
from tp_engine.server.bodies import in_thread, read_body
from tp_engine.server.disconnect import until_disconnect
from tp_engine.server.generation import update_batches, whole_outputs
from tp_engine.server.middleware import name_request
from tp_engine.server.openapi import takes
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import merge


def add_pooling_routes(app: FastAPI, state: ServerState) -> None:
    """``/v1/embeddings``, and ``/score`` and ``/rerank`` under the paths that clients of vLLM, Jina and Cohere use."""

    @app.post("/v1/embeddings", **takes(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """The vectors of one or several inputs, as text or token ids."""
        return await _answer(state, request, EmbeddingBody)

    @app.post("/score", **takes(ScoreBody))
    @app.post("/v1/score", **takes(ScoreBody))
    async def score(request: Request) -> Response:
        """How well documents answer queries."""
        return await _answer(state, request, ScoreBody)

    @app.post("/rerank", **takes(RerankBody))
    @app.post("/v1/rerank", **takes(RerankBody))
    @app.post("/v2/rerank", **takes(RerankBody))
    async def rerank(request: Request) -> Response:
        """Documents in the order in which they answer a query, the best first."""
        return await _answer(state, request, RerankBody)


async def _answer(state: ServerState, request: Request, kind: type[AnyPooledBody]) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError``."""
    state.check_room()
    return await answer_pooled(state, request, await read_body(kind, request, state))


async def answer_pooled(state: ServerState, request: Request, body: AnyPooledBody) -> Response:
    """As the routes, for a body that has been read.

    The vectors are written in a thread too: a large answer does not hold up the event loop.
    """
    model = state.model_name(body.model)
    body.request_id = name_request(request.scope["state"], body.request_id)
    llm = state.llm
    with state.limit.hold(num_pooled(body), "input" if isinstance(body, EmbeddingBody) else "documents"):
        prepared = await in_thread(request, state, prepare_pooled, body, llm.input_processor, llm.model_info, model)
        batches = merge([update_batches(state, engine_request) for engine_request in prepared.requests])
        outputs = await until_disconnect(request.receive, whole_outputs(len(prepared.requests), batches))
        return await in_thread(request, state, lambda: json_reply(prepared.answer(outputs)))
