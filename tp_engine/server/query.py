"""Query parameters of the routes for operators: each is obeyed, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from tp_engine.errors import RequestError, shown

Meaning = TypeVar("Meaning")

SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
# What a route takes; all others take none.
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "/pause": ("mode", "clear_cache", "wait_for_inflight_requests"),
    "/reset_prefix_cache": ("reset_running_requests", "reset_external"),
    "/server_info": ("config_format",),
    "/sleep": ("level", "mode"),
    "/wake_up": ("tags",),
}


async def known_query(request: Request) -> None:
    """Guard routes that act, as their dependency: a parameter that nothing reads would be an order that nobody keeps.

    Raises ``RequestError`` for such a one.
    """
    path = request.scope["route"].path
    known = _KNOWN.get(path, ())
    if unknown := sorted(request.query_params.keys() - set(known)):
        takes = ", ".join(known) or "none"
        raise RequestError(
            f"{path} has no query parameter {shown(unknown[0])}; it takes {takes}", param=unknown[0][:200]
        )


def query_choice(request: Request, name: str, values: Mapping[str, Meaning], default: str) -> Meaning:
    """Return what a query parameter means, in any case of letters; ``RequestError`` for a text that is not in
    ``values``."""
    text = request.query_params.get(name, default)
    if text.lower() not in values:
        raise RequestError(f"{name} is {text[:80]}; it must be {' or '.join(values)}", param=name)
    return values[text.lower()]
