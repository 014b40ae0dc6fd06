"""Refuses requests that a page of another site can make a browser send, and bodies whose end is ambiguous.

A browser sends a *simple* request to any address, also to a server on the user's machine, without asking that server
first; only the answer is hidden from the page.  So a request that acts must prove that no such page sent it::

    Host            one of this server's names         else a name of the page's owner may lead here (DNS rebinding)
    Origin          this server's, or an allowed one   of requests other than GET, HEAD and OPTIONS
    Content-Type    application/json                   of every body: pages need a permission (CORS) to send that

Clients other than browsers send no Origin and no Sec-Fetch-Site.
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.types import Scope

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import RequestError, shown
from tp_engine.server.config import ServerConfig
from tp_engine.server.listener import is_local
from tp_engine.server.middleware import has_two_lengths

_SAFE = ("GET", "HEAD", "OPTIONS")
_OWN_SITE = ("same-origin", "none")  # values of Sec-Fetch-Site, which scripts cannot set; none: the user's action
_JSON = "application/json"
_FORM = "multipart/form-data"
_UPLOADS = "/v1/files"  # the one path that takes a form; its Origin is checked like all others


class RequestGuard:
    """Raises for requests of other sites' pages (403), and for bodies that are not JSON (400)."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = config.allowed_origins
        self._hosts: tuple[str, ...] | None = None  # any
        if config.uds is None and (config.allowed_hosts or is_local(config)) and "*" not in config.allowed_hosts:
            self._hosts = (*(name.lower() for name in config.allowed_hosts), config.host.lower())

    def __call__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            if not self._is_own(host):
                raise HttpError(
                    403,
                    f"the header Host is {shown(host)}, which is not a name of this server; if it is, start the server "
                    "with --allowed-hosts NAME",
                    code="host_not_allowed",
                )
        if has_two_lengths(headers):
            raise RequestError("the request has both Transfer-Encoding and Content-Length; send one of them")
        if scope["method"] in _SAFE:
            return
        if self._is_of_another_site(headers):
            origin = headers.get("origin", "unknown")
            raise HttpError(
                403,
                f"the request comes from a web page of another origin ({shown(origin)}), which may not act here; to "
                "let it, start the server with --allowed-origins ORIGIN",
                code="cross_site_request",
            )
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            _check_type(headers.get("content-type"), takes_form=scope["path"].rstrip("/").endswith(_UPLOADS))

    def _is_own(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].lower()  # without its port
        if name == "localhost" or name in self._hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return any(name.endswith(pattern[1:]) for pattern in self._hosts if pattern.startswith("*."))

    def _is_of_another_site(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return False
        if site is not None:
            return site not in _OWN_SITE
        return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _check_type(given: str | None, *, takes_form: bool) -> None:
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != _JSON and not (takes_form and kind == _FORM):
        found = "has no content type" if given is None else f"is of type {shown(kind)}"
        raise RequestError(f"the body {found}; send Content-Type: {_JSON}")
