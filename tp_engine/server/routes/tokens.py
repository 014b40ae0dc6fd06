"""Text to token ids and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.openai.protocol import parse_body
from tp_engine.api.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tp_engine.server.guards import read_body
from tp_engine.server.openapi import takes
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/tokenize`` and ``/detokenize``; long texts do not hold up the event loop, and many of them are refused."""

    @app.post("/tokenize", **takes(TokenizeBody))
    async def tokenized(request: Request) -> Response:
        """The token ids of a text, or of a chat as its template writes it."""
        body = parse_body(TokenizeBody, await read_body(request, state.config))
        state.model_name(body.model)
        processor = state.llm.input_processor
        return await _answer(state, lambda: tokenize(body, processor))

    @app.post("/detokenize", **takes(DetokenizeBody))
    async def detokenized(request: Request) -> Response:
        """The text of token ids."""
        body = parse_body(DetokenizeBody, await read_body(request, state.config))
        state.model_name(body.model)
        processor = state.llm.input_processor
        return await _answer(state, lambda: detokenize(body, processor))


async def _answer(state: ServerState, work: Callable[[], dict[str, Any]]) -> Response:
    with state.admission.hold(1):
        return json_reply(await asyncio.get_running_loop().run_in_executor(state.tokenizing, work))
