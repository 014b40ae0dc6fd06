"""The HTTP application: its routes, the middleware before them, and one shape for every error."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.server.access import KeyGuard, admins_only
from tp_engine.server.admin_routes import add_admin_routes
from tp_engine.server.anthropic_routes import MESSAGES_PATH, add_anthropic_routes, shape_own_errors
from tp_engine.server.batch_routes import add_batch_routes
from tp_engine.server.middleware import Checks, Entrance, plain_paths
from tp_engine.server.openai_routes import PROMPT_PATHS, add_openai_routes
from tp_engine.server.openapi import install_openapi
from tp_engine.server.query import QueryGuard
from tp_engine.server.replies import ClientGoneError, error_reply
from tp_engine.server.request_guard import RequestGuard
from tp_engine.server.state import ServerState
from tp_engine.server.turns import Turns
from tp_engine.server.web_page import ASSETS, add_web_page
from tp_engine.server.weight_routes import add_weight_routes
from tp_engine.system.version import __version__

# All other paths need a key where the server has keys.
OPEN_PATHS = ("/live", "/health", "/ping", "/ready", "/version", "/metrics", "/")
_OPEN = (OPEN_PATHS, [f"/page/{name}" for name in ASSETS])
_CLIENT_GONE = 499


def create_app(state: ServerState) -> FastAPI:
    """The application; ``state`` gets its engine when that is ready."""
    config = state.config
    described = not config.disable_fastapi_docs
    app = FastAPI(
        title="tp_engine",
        version=__version__,
        openapi_url="/openapi.json" if described else None,
        docs_url="/docs" if described else None,
        redoc_url="/redoc" if described else None,
        redirect_slashes=False,
    )
    add_openai_routes(app, state)
    add_anthropic_routes(app, state)
    add_batch_routes(app, state)
    admin = APIRouter(dependencies=[Depends(admins_only)])
    add_admin_routes(app, admin, state)
    add_weight_routes(admin, state)
    app.include_router(admin)
    add_web_page(app, state)
    install_openapi(app)
    _add_error_handlers(app)
    _add_middleware(app, state)
    return app


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Innermost first: a request passes the last one first."""
    config = state.config
    probes, page = ([prefix + path for path in paths for prefix in ("", config.root_path)] for paths in _OPEN)

    def has_room(scope: Scope) -> None:
        if scope["path"] not in probes:
            state.connections.check_room()

    known_query = QueryGuard(app.routes, (*page, f"{config.root_path}/", "/"), config.root_path)
    app.add_middleware(Turns, state, (*PROMPT_PATHS, MESSAGES_PATH))
    app.add_middleware(
        Checks, RequestGuard(config), KeyGuard(config, (*probes, *page)), plain_paths(config.root_path), known_query
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Request-Id", "Retry-After", "X-Should-Retry"),
        )
    app.add_middleware(Checks, has_room)
    app.add_middleware(Entrance, state.metrics.http, state.bodies, shape_own_errors, config.root_path)


def _add_error_handlers(app: FastAPI) -> None:
    """Answer exceptions with ``{"error": {...}}``."""
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ClientGoneError: _gone,
        ClientDisconnect: _gone,
        RequestError: _refused,
        HttpError: _refused,
        EngineDeadError: _refused,
        Exception: _refused,
        HTTPException: _unknown_route,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _refused(_request: Request, error: Exception) -> Response:
    return error_reply(error)


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    texts = {404: f"there is no {where}", 405: f"{where} is not allowed here"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    reply = error_reply(HttpError(error.status_code, texts.get(error.status_code, str(error.detail)), code=code))
    reply.headers.update(error.headers or {})
    return reply
