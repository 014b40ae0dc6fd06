"""The routes of OpenAI's API: completions, chats, responses, models; and text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tp_engine.server.bodies import in_thread, read_body
from tp_engine.server.generation import answer
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_openai_routes(app: FastAPI, state: ServerState) -> None:
    """Everything under ``/v1/``, ``/tokenize`` and ``/detokenize``."""
    _add_generation(app, state)
    _add_tokens(app, state)
    _add_models(app, state)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", **takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts, as text or token ids."""
        return await answer(state, request, CompletionBody)

    @app.post("/v1/chat/completions", **takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(state, request, ChatBody)

    @app.post("/v1/responses", **takes(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer text or a list of items with a list of items; nothing is stored."""
        return await answer(state, request, ResponsesBody)

    @app.get("/v1/responses/{response_id}", responses=ANSWERS)
    @app.delete("/v1/responses/{response_id}", responses=ANSWERS)
    async def stored_response(response_id: str) -> Response:
        """404: responses are not stored."""
        raise HttpError(
            404,
            f"there is no response {response_id[:80]!r}; this server stores none, keep the answer to your request",
            code="response_not_found",
        )


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    """Long texts do not hold up the event loop, and the limit on prompts counts these requests too."""

    async def tokens_reply(request: Request, work: Callable[[], dict[str, Any]]) -> Response:
        with state.limit.hold(1):
            return json_reply(await in_thread(request, state, work))

    @app.post("/tokenize", **takes(TokenizeBody))
    async def tokenized(request: Request) -> Response:
        """The token ids of a text, or of a chat as its template writes it."""
        body = await read_body(TokenizeBody, request, state)
        state.model_name(body.model)
        processor = state.llm.input_processor
        return await tokens_reply(request, lambda: tokenize(body, processor))

    @app.post("/detokenize", **takes(DetokenizeBody))
    async def detokenized(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(DetokenizeBody, request, state)
        state.model_name(body.model)
        processor = state.llm.input_processor
        return await tokens_reply(request, lambda: detokenize(body, processor))


def _add_models(app: FastAPI, state: ServerState) -> None:
    """Models are listed only while ``/health`` is 200: clients take a listed model for one that is served."""

    @app.get("/v1/models", responses=ANSWERS)
    async def models() -> Response:
        """The names under which the model is served, and its adapters."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        cards = [_model_card(state, name, max_model_len) for name in (*state.model_names, *state.adapters)]
        return json_reply({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", responses=ANSWERS)
    async def model(name: str) -> Response:
        """One of the names; 404 for any other."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        return json_reply(_model_card(state, state.model_name(name), max_model_len))


def _model_card(state: ServerState, name: str, max_model_len: int) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": state.created, "owned_by": "tp_engine"}
    root, parent = state.model_names[0], None
    if name in state.adapters:
        root, parent = state.adapters[name], state.model_names[0]
    return card | {"root": root, "parent": parent, "max_model_len": max_model_len}
