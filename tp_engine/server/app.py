"""The HTTP application: routes, what every request passes before them, and the one shape of every error."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tp_engine.server.error_handlers import add_error_handlers
from tp_engine.server.guards import ApiKeyGuard
from tp_engine.server.head_requests import HeadRequests
from tp_engine.server.metrics.http import HttpMetrics
from tp_engine.server.openapi import install_openapi
from tp_engine.server.request_context import RequestContext
from tp_engine.server.request_ids import RequestIds
from tp_engine.server.root_path import RootPath
from tp_engine.server.routes import register_routes
from tp_engine.server.state import ServerState
from tp_engine.server.turnstile import Turnstile


def create_app(state: ServerState) -> FastAPI:
    """The application; ``state`` gets its engine when that is ready."""
    config = state.config
    described = not config.disable_fastapi_docs
    app = FastAPI(
        title="tp_engine",
        openapi_url="/openapi.json" if described else None,
        docs_url="/docs" if described else None,
        redoc_url="/redoc" if described else None,
        redirect_slashes=False,
    )
    register_routes(app, state)
    install_openapi(app)
    add_error_handlers(app)
    if config.root_path:
        app.add_middleware(RootPath, root_path=config.root_path)
    if config.api_keys:
        app.add_middleware(ApiKeyGuard, api_keys=config.api_keys, root_path=config.root_path)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app.add_middleware(RequestContext)
    app.add_middleware(RequestIds)
    app.add_middleware(HeadRequests)
    app.add_middleware(Turnstile)
    app.add_middleware(HttpMetrics, figures=state.metrics.http)
    return app
