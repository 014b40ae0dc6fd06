"""The routes, and the one shape of every error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tp_engine.api.openai_errors import HttpError
from tp_engine.api.openai_protocol import ChatBody, CompletionBody
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.server.generation import answer
from tp_engine.server.guards import ApiKeyGuard
from tp_engine.server.replies import ClientGoneError, error_reply, json_reply
from tp_engine.server.state import ServerState

_STATS_TIMEOUT_S = 2.0
_CLIENT_GONE = 499


def create_app(state: ServerState) -> FastAPI:
    """The application; ``state`` gets its engine when that is ready."""
    app = FastAPI(title="tp_engine", root_path=state.config.root_path, openapi_url=None, redirect_slashes=False)
    _add_generation(app, state)
    _add_status(app, state)
    _add_error_shapes(app)
    if state.config.api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=state.config.api_key, root_path=state.config.root_path)
    return app


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(state, request, CompletionBody)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(state, request, ChatBody)


def _add_status(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return json_reply({"object": "list", "data": [_model_card(state, name) for name in state.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_reply(_model_card(state, state.model_name(name)))

    @app.get("/health")
    async def health() -> Response:
        state.check_healthy()
        return json_reply({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        state.check_ready()
        return json_reply({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await state.llm.stats(timeout_s=_STATS_TIMEOUT_S)
        except (HttpError, EngineDeadError, TimeoutError):
            stats = None
        return Response(state.metrics.exposition(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_shapes(app: FastAPI) -> None:
    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    async def refused(_request: Request, error: Exception) -> Response:
        return error_reply(error)

    async def unknown_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:200]}"
        texts = {404: f"there is no {where}", 405: f"{where} is not allowed here"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        reply = error_reply(HttpError(error.status_code, texts.get(error.status_code, str(error.detail)), code=code))
        reply.headers.update(error.headers or {})
        return reply

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ClientGoneError: gone,
        ClientDisconnect: gone,
        RequestError: refused,
        HttpError: refused,
        EngineDeadError: refused,
        Exception: refused,
        HTTPException: unknown_route,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _model_card(state: ServerState, name: str) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": state.created, "owned_by": "tp_engine"}
    if state.max_model_len is not None:
        card["max_model_len"] = state.max_model_len
    return card
