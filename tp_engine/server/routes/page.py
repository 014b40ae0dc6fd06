"""The web page: a playground for chats, and a live view of the engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from tp_engine.api.openai.errors import HttpError
from tp_engine.server.page_files import ASSETS, INDEX, page_reply
from tp_engine.server.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """``/`` and its files under ``/page/``, which need no key: what they show comes from routes that do."""

    @app.get("/", responses={200: {"content": {"text/html": {}}}})
    async def index() -> Response:
        """The web page."""
        return page_reply(INDEX, state.config.root_path)

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HttpError(404, f"the page has no file {name[:80]!r}", code="not_found")
        return page_reply(name)
