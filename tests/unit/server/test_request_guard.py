"""What a page of another site makes a browser send has no effect, whatever the route; other clients notice nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.asgi import App
from tests.unit.server.test_server_api import error_of, serve
from tp_engine.server.config import ServerConfig

BODY = json.dumps({"prompt": "a"}).encode()
EVIL = "https://evil.example"


def test_no_route_acts_for_a_page_of_another_site() -> None:
    """Oracle: 403 for every operation of the schema that may act, by Origin alone and by Sec-Fetch-Site alone."""

    async def scenario(app: App) -> None:
        acting = [
            (method.upper(), path.replace("{", "").replace("}", ""))
            for path, operations in app.app.openapi()["paths"].items()
            for method in operations
            if method not in ("get", "head", "options")
        ]
        assert ("POST", "/sleep") in acting and ("POST", "/v1/completions") in acting
        for method, path in acting:
            for headers in ({"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
                reply = await app.start(method, path, BODY, **headers).reply()
                is_anthropic = path.startswith("/v1/messages")  # errors of another form, without a code
                error = reply.json()["error"] if is_anthropic else error_of(reply)
                assert (reply.status, is_anthropic or error["code"] == "cross_site_request") == (403, True), path
                assert "--allowed-origins" in error["message"]

    assert serve(scenario).added == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://friend.example"}, 200),
        ({"Origin": "https://friend.example"}, 200),
        ({"Origin": "https://friend.example.evil.example"}, 403),
        ({"Origin": "http://["}, 403),
    ],
    ids=str,
)
def test_origins_of_requests_that_act(headers: dict[str, str], status: int) -> None:
    """Oracle: the browser's own word, else that the page's origin is the server's or an allowed one."""

    async def scenario(app: App) -> None:
        assert (await app.start("POST", "/v1/completions", BODY, **headers).reply()).status == status
        assert (await app.start("GET", "/v1/models", **headers).reply()).status == 200

    serve(scenario, config=ServerConfig(allowed_origins=("https://friend.example",)))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": ""}, 400),
        ({"Content-Type": "", "Content-Length": "", "Transfer-Encoding": "chunked"}, 400),
        ({"Content-Type": "text/plain"}, 400),
        ({"Content-Type": "text/plain; x=application/json"}, 400),
        ({"Content-Type": "application/jsonp"}, 400),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 400),
        ({"Content-Type": "Application/JSON ; charset=utf-8"}, 200),
    ],
    ids=str,
)
def test_bodies_are_json_by_their_header(headers: dict[str, str], status: int) -> None:
    """Oracle: a page may send no such header without a permission; also on routes that read no body."""

    async def scenario(app: App) -> None:
        for path in ("/v1/completions", "/ping"):
            reply = await app.start("POST", path, BODY, **headers).reply()
            assert reply.status == status, path
            if status != 200:
                assert "send Content-Type: application/json" in error_of(reply)["message"]
        unsent = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": "0"}  # curl -X POST -d ''
        assert (await app.start("POST", "/ping", **unsent).reply()).status == 200

    serve(scenario)


LOCAL = ("localhost", "localhost:8000", "127.0.0.1", "127.3.2.1:80", "[::1]", "[::1]:8000", "LOCALHOST")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[::2]")


@pytest.mark.parametrize(
    ("config", "own", "others"),
    [
        ({}, LOCAL, FOREIGN),
        ({"host": "localhost"}, LOCAL, FOREIGN),
        ({"host": "0.0.0.0"}, (*LOCAL, *FOREIGN), ()),
        ({"uds": "/tmp/unused"}, (*LOCAL, *FOREIGN), ()),
        ({"allowed_hosts": ("api.example", "*.lab.example")}, (*LOCAL, "api.example:1", "a.lab.example"), FOREIGN),
        ({"allowed_hosts": ("api.example",), "host": "0.0.0.0"}, (*LOCAL, "API.example"), ("evil.example", "10.0.0.1")),
        ({"allowed_hosts": ("*",)}, FOREIGN, ()),
    ],
    ids=str,
)
def test_names_of_the_server(config: dict[str, Any], own: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Oracle: a name that leads here although this server does not have it is DNS rebinding; nothing is answered."""

    async def scenario(app: App) -> None:
        for host in own:
            assert (await app.start("GET", "/v1/models", Host=host).reply()).status == 200, host
        for host in others:
            for path in ("/v1/models", "/engine", "/", "/health"):
                reply = await app.start("GET", path, Host=host).reply()
                assert (reply.status, error_of(reply)["code"]) == (403, "host_not_allowed"), (host, path)
                assert "--allowed-hosts" in error_of(reply)["message"]
        assert (await app.start("GET", "/health", Host="").reply()).status == 200, "HTTP/1.0 has no such header"

    serve(scenario, config=ServerConfig(**config))


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    """Oracle: RFC 9112 6.1: a proxy in front may see the request's end elsewhere."""

    async def scenario(app: App) -> None:
        for path in ("/v1/completions", "/health"):
            reply = await app.start("POST", path, BODY, **{"Transfer-Encoding": "chunked"}).reply()
            assert (reply.status, reply.headers["connection"]) == (400, "close")
            assert "both Transfer-Encoding and Content-Length" in error_of(reply)["message"]

    serve(scenario)
