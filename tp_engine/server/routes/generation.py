"""Completions and chats."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.server.generation import answer
from tp_engine.server.openapi import takes
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/v1/completions`` and ``/v1/chat/completions``."""

    @app.post("/v1/completions", **takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts, as text or token ids."""
        return await answer(state, request, CompletionBody)

    @app.post("/v1/chat/completions", **takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(state, request, ChatBody)
