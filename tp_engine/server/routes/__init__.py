"""All routes of the server: a module has one function, ``add_routes(app, state)``, and is named here once."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from tp_engine.server.routes import control, engine_view, generation, metrics, models, page, responses, status, tokens
from tp_engine.server.state import ServerState

ROUTES: tuple[Callable[[FastAPI, ServerState], None], ...] = (
    generation.add_routes,
    responses.add_routes,
    tokens.add_routes,
    models.add_routes,
    status.add_routes,
    metrics.add_routes,
    engine_view.add_routes,
    control.add_routes,
    page.add_routes,
)


def register_routes(app: FastAPI, state: ServerState) -> None:
    """Give ``app`` every route of the server."""
    for add_routes in ROUTES:
        add_routes(app, state)
