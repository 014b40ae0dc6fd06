"""The files of the web page, as they lie in ``page/``, and how a browser is told to treat them."""

from __future__ import annotations

import html
from functools import cache
from importlib import resources

from starlette.responses import Response

_FOLDER = resources.files("tp_engine.server") / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but this server is ever asked, nothing inline is run, and no other page may put this one into a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'self'; object-src 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_HEAD = "<head>\n"

INDEX = "index.html"
ASSETS = tuple(sorted(file.name for file in _FOLDER.iterdir() if file.name != INDEX))


def page_reply(name: str, root_path: str = "") -> Response:
    """The file ``name``, one of ``ASSETS`` or ``INDEX``; under ``root_path``, the index's links begin with that."""
    text = _text(name)
    if name == INDEX and root_path:
        text = text.replace(_HEAD, f'{_HEAD}    <base href="{html.escape(root_path)}/" />\n', 1)
    return Response(text, headers=_HEADERS | {"Content-Type": _TYPES[name[name.rindex(".") :]]})


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
