"""Who may do what: keys of clients and operators on every route, requests of others, and folders that HTTP may name."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import App, until
from tests.fake_engine import FakeEngine, arith
from tests.unit.server.test_server_api import error_of, ids, serve
from tp_engine.errors import ConfigError, RequestError
from tp_engine.server.access import ModelDirs, warn_of_exposure
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

PAGE = Path(__file__).parents[3] / "docs" / "http_api.md"
CLIENT, OTHER, OPERATOR = ({"Authorization": f"Bearer {name}"} for name in ("client", "other", "operator"))
KEYS: dict[str, Any] = {"api_key": ("client", "other"), "admin_api_key": ("operator",)}


def table_of_keys() -> dict[str, str]:
    """The routes of docs/http_api.md: which key each needs, by the line above its table."""
    text = PAGE.read_text(encoding="utf-8").split("\n## Endpoints\n", 1)[1].split("\n## ", 1)[0]
    found, needed = dict[str, str](), ""
    for line in text.splitlines():
        if title := re.match(r"(Without a|With any|With an operator's) key.*:$", line):
            needed = {"Without a": "none", "With any": "any"}.get(title[1], "an operator's")
        if line.startswith("| "):
            found |= dict.fromkeys(re.findall(r"`([A-Z]+ /[^`]*)`", line.split(" | ")[0]), needed)
    return found


def routes() -> list[tuple[str, str]]:
    paths = create_app(ServerState(ServerConfig(), ("demo",))).openapi()["paths"]
    described = [(method.upper(), path) for path, operations in paths.items() for method in operations]
    return [*described, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc")]


def test_the_table_of_keys_has_every_route() -> None:
    """Oracle: the server's own schema, and its pages, in both directions: a new route needs a decision."""
    documented = set(table_of_keys())
    assert {f"{method} {path}" for method, path in routes()} == documented, "docs/http_api.md, Endpoints"


def test_every_route_needs_the_key_of_the_table() -> None:
    """Oracle: docs/http_api.md: 401 without a needed key, 403 with a client's where an operator's is needed."""
    table = table_of_keys()
    assert set(table.values()) == {"none", "any", "an operator's"}

    async def scenario(app: App) -> None:
        for method, path in routes():
            assert f"{method} {path}" in table, "docs/http_api.md lacks it"
            needed, where = table[f"{method} {path}"], path.replace("{", "").replace("}", "")
            statuses = [(await app.start(method, where, **key).reply()).status for key in ({}, CLIENT, OPERATOR)]
            assert (statuses[0] == 401) == (needed != "none"), (method, path, statuses)
            assert (statuses[1] == 403) == (needed == "an operator's"), (method, path, statuses)
            assert statuses[2] not in (401, 403), (method, path, statuses)

    serve(scenario, config=ServerConfig(**KEYS))


@pytest.mark.parametrize(
    ("config", "statuses"),
    [
        # without a key, a client's, the operator's
        ({}, (200, 200, 200)),
        ({"host": "0.0.0.0"}, (403, 403, 403)),
        ({"uds": "/tmp/unused"}, (200, 200, 200)),
        ({"api_key": ("client",)}, (401, 403, 401)),
        ({"admin_api_key": ("operator",)}, (403, 403, 200)),
        (KEYS, (401, 403, 200)),
    ],
    ids=str,
)
def test_who_may_act_on_the_engine(config: dict[str, Any], statuses: tuple[int, ...]) -> None:
    """Oracle: by hand, of each way to start the server; a refusal names the flag, and everybody may still generate."""

    async def scenario(app: App) -> None:
        for key, status in zip(({}, CLIENT, OPERATOR), statuses, strict=True):
            reply = await app.post("/reset_prefix_cache", None, **key)
            assert reply.status == status, key
            if status == 403:
                assert "--admin-api-key" in error_of(reply)["message"]
                assert error_of(reply)["code"] == "admins_only"
            served = await app.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **key)
            assert served.status == (401 if status == 401 else 200)

    serve(scenario, config=ServerConfig(**config))


def test_a_key_ends_its_own_requests_only() -> None:
    """Oracle: others' ids are as unknown ones, and ``abort_all`` is all of the key; an operator reaches all."""

    async def scenario(app: App) -> None:
        body = {"prompt": ids("a"), "max_tokens": 1000, "ignore_eos": True, "stream": True}
        for number, key in enumerate((CLIENT, CLIENT, OTHER, OTHER)):
            app.start("POST", "/v1/completions", {**body, "request_id": f"r{number}"}, **key)
        await until(lambda: len(app.state.running.all()) == 4, "all to run")
        num_running = 4
        for asked, key, num_ended in (
            ({"request_ids": ["r0", "r2", "cmpl-r3"]}, CLIENT, 1),
            ({"request_ids": ["r0", "r2"]}, {**OTHER, "X-Request-Id": "x"}, 1),
            ({"abort_all": True}, CLIENT, 1),
            ({"abort_all": True}, CLIENT, 0),
            ({"abort_all": True}, OPERATOR, 1),
        ):
            reply = await app.post("/abort", asked, **key)
            assert (reply.status, reply.json()) == (200, {"num_aborted": num_ended}), asked
            num_running -= num_ended
            await until(lambda num=num_running: len(app.state.running.all()) == num, "their end")  # type: ignore[misc]

    serve(scenario, FakeEngine(arith, step_delay_s=0.005), ServerConfig(**KEYS))


def test_a_client_sees_figures_and_no_requests_of_others() -> None:
    """Oracle: ids, lengths and configuration of the whole server are for operators."""

    async def scenario(app: App) -> None:
        body = {"prompt": ids("a"), "max_tokens": 1000, "ignore_eos": True, "request_id": "secret-name"}
        running = app.start("POST", "/v1/completions", body, **OTHER)
        await until(lambda: app.state.running.all() != [], "the request to run")
        for key, is_admin in ((CLIENT, False), (OPERATOR, True)):
            page = await app.start("GET", "/engine", **key).reply()
            assert (b"secret-name" in page.content) == is_admin
            assert len(page.json()["requests"]["shown"]) + page.json()["requests"]["omitted"] == 1
            info = (await app.start("GET", "/server_info", **key).reply()).json()
            assert info["served_model_name"] == "demo" and info["tp_size"] == 1
            assert ("server" in info) == is_admin and ("engine" in info) == is_admin
        running.leave()
        await running.ended()

    serve(scenario, FakeEngine(arith, step_delay_s=0.005), ServerConfig(**KEYS))


def test_folders_that_requests_may_name(tmp_path: Path) -> None:
    """Oracle: below an allowed folder, links followed; the refusal does not tell whether a folder exists."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "step-1", outside / "secret"):
        folder.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (tmp_path / "alias").symlink_to(inside)
    dirs = ModelDirs((str(inside),), "owner/name", ())
    for folder in (inside, inside / "step-1", inside / "step-2", inside / "x/../step-1", Path("owner/name")):
        dirs.check(str(folder), "model_path")
    refusals = set()
    for name in ("outside/secret", "outside/nothing", "inside/link/secret", "inside/../outside", "inside-2", "alias/x"):
        with pytest.raises(RequestError, match="allowed-model-dirs") as caught:
            dirs.check(f"{tmp_path}/{name}", "model_path")
        refusals.add(str(caught.value).replace(name, ""))
        assert caught.value.param == "model_path"
    assert len(refusals) == 1
    for strange in ("", "/", ".", "~", f"{inside}/link/../step-1", f"{inside}/a\0b", "x" * 10_000, "other/name"):
        with pytest.raises(RequestError):
            dirs.check(strange, "model_path")
    ModelDirs(("/",), "x", ()).check("/anything", "model_path")
    ModelDirs((), str(tmp_path / "alias"), (str(outside),)).check(f"{inside}/step-1", "model_path")
    ModelDirs((), str(inside), (str(outside),)).check(f"{outside}/secret", "model_path")


def test_routes_take_allowed_folders_only(tmp_path: Path) -> None:
    """Oracle: 400 that names the field, before the engine hears of it."""

    async def scenario(app: App) -> None:
        for folder in ("/etc", str(tmp_path / "no"), "fake/../.."):
            reply = await app.post("/update_weights_from_disk", {"model_path": folder})
            assert reply.status == 400 and error_of(reply)["param"] == "model_path"

    assert serve(scenario).orders == []


def test_keys_in_files(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one key in a line, beside those given; a file that others can read is named in the log."""
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("one\r\n\n  two  \n")
    admin.write_text("three")
    keys.chmod(0o644)
    admin.chmod(0o600)
    monkeypatch.setenv("TP_ENGINE_API_KEY", "unused")
    config = ServerConfig(api_key="zero", api_key_file=str(keys), admin_api_key_file=str(admin))  # type: ignore[arg-type]
    assert (config.api_keys, config.admin_api_keys) == (("zero", "one", "two"), ("three",))
    with caplog.at_level(logging.WARNING):
        warn_of_exposure(config)
    assert re.findall(r"keys in (\S+) can be read by other users \(mode (\d+)\)", caplog.text) == [(str(keys), "644")]
    monkeypatch.setenv("TP_ENGINE_ADMIN_API_KEY", "four")
    assert ServerConfig().admin_api_keys == ("four",)
    (tmp_path / "empty").write_text("\n")
    for path, words in (("empty", "holds no key"), ("none", "No such file"), (".", "a folder")):
        with pytest.raises(ConfigError, match=words):
            ServerConfig(api_key_file=str(tmp_path / path))
    with pytest.raises(ConfigError, match="a key of their own"):
        ServerConfig(api_key="same", admin_api_key="same")  # type: ignore[arg-type]


def test_a_key_has_no_white_space_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of what a client sends none is left, so such a key let nobody in; one that is blank lets nobody in."""
    monkeypatch.setenv("TP_ENGINE_API_KEY", "secret\n")
    assert ServerConfig().api_keys == ("secret",)
    assert ServerConfig(api_key=(" a", "b\t"), admin_api_key="c\n").api_keys == ("a", "b")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a key of their own"):
        ServerConfig(api_key="same", admin_api_key="same ")  # type: ignore[arg-type]
    monkeypatch.setenv("TP_ENGINE_API_KEY", " \n")
    with pytest.raises(ConfigError, match="api_key is blank; give a key"):
        ServerConfig()


@pytest.mark.parametrize(
    ("config", "warns"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "::"}, True), ({"host": "0.0.0.0", "api_key": ("k",)}, False)],
    ids=str,
)
def test_an_open_server_is_named_in_the_log(
    config: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: a server that others reach without a key is said to be open."""
    with caplog.at_level(logging.WARNING):
        warn_of_exposure(ServerConfig(**config))
    assert ("everybody who reaches" in caplog.text) == warns
