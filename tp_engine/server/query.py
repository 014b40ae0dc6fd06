"""Query parameters: on every route, each is used, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from tp_engine.errors import RequestError, shown

Meaning = TypeVar("Meaning")

SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
# What a route takes; all others take none.
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "GET /engine": ("samples",),
    "GET /server_info": ("config_format",),
    "GET /v1/batches": ("after", "limit"),
    "GET /v1/files": ("after", "limit", "order", "purpose"),
    "POST /pause": ("mode", "clear_cache", "wait_for_inflight_requests"),
    "POST /reset_prefix_cache": ("reset_running_requests", "reset_external"),
    "POST /sleep": ("level", "mode"),
    "POST /wake_up": ("tags",),
}
# What clients send with every request and what changes no answer: Azure's, Anthropic's, Codex.
_MEANINGLESS = ("api-version", "beta", "client_version")


class QueryGuard:
    """Raises ``RequestError`` for a parameter that nothing reads, instead of ignoring it.

    Paths without a route get their 404 later; the page and its files (``free_paths``) take any.
    """

    def __init__(self, routes: Sequence[BaseRoute], free_paths: Iterable[str], root_path: str) -> None:
        self._routes = routes
        self._free_paths = frozenset(free_paths)
        self._root_path = root_path

    def __call__(self, scope: Scope) -> None:
        if not scope["query_string"] or scope["path"] in self._free_paths:
            return
        path = scope["path"].removeprefix(self._root_path)
        known = _KNOWN.get(f"{scope['method']} {path}", ())
        unknown = sorted(QueryParams(scope["query_string"]).keys() - set(known) - set(_MEANINGLESS))
        if unknown and any(route.matches(scope)[0] is Match.FULL for route in self._routes):
            raise RequestError(
                f"{path[:200]} has no query parameter {shown(unknown[0])}; it takes {', '.join(known) or 'none'}",
                param=unknown[0][:200],
            )


def query_choice(request: Request, name: str, values: Mapping[str, Meaning], default: str) -> Meaning:
    """The meaning of a query parameter, in upper or lower case; raises ``RequestError`` for one not in ``values``."""
    text = request.query_params.get(name, default)
    if text.lower() not in values:
        raise RequestError(f"{name} is {text[:80]}; it must be {' or '.join(values)}", param=name)
    return values[text.lower()]
