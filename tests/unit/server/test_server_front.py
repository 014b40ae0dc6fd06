"""Which requests may enter, and from where: keys, origins, Unix sockets, certificates, generation defaults."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.asgi import App, run_served
from tests.fake_engine import MODEL_INFO, FakeEngine, echo
from tests.tiny_server import chat_tokenizer
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.sampling import chat_params, completion_params
from tp_engine.api.sampling_defaults import load_generation_defaults
from tp_engine.config import DEMO_MODEL
from tp_engine.errors import ConfigError
from tp_engine.server.admin_routes import public_fields
from tp_engine.server.app import OPEN_PATHS
from tp_engine.server.config import ServerConfig
from tp_engine.server.listener import close_listener, listener_url, open_listener
from tp_engine.server.main import Frontend, share_interpreter
from tp_engine.system.version import __version__


def serve(scenario: Any, **config: Any) -> None:
    run_served(scenario, FakeEngine(echo), chat_tokenizer(), ServerConfig(**config))


def test_each_key_opens_and_nothing_else() -> None:
    """Oracle: 401 in the one shape for every route of the schema but the open ones; both keys are valid."""

    async def scenario(app: App) -> None:
        paths = app.app.openapi()["paths"]
        assert set(OPEN_PATHS) <= paths.keys()
        for path, operations in paths.items():
            for method in operations:
                reply = await app.start(method.upper(), path.replace("{", "").replace("}", "")).reply()
                assert (reply.status == 401) == (path not in OPEN_PATHS), path
        for path in ("/openapi.json", "/docs", "/redoc", "//health", "/health/x"):
            assert (await app.get(path)).status == 401, path
        for header in ("Bearer one", "bearer  two", "Bearer two"):
            assert (await app.start("GET", "/v1/models", Authorization=header).reply()).status == 200, header
        for header in ("Bearer", "Bearer three", "one", "Basic one", "Bearer one two", "Bearer ön"):
            reply = await app.start("GET", "/v1/models", Authorization=header).reply()
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer", header
            assert reply.json()["error"]["code"] == "invalid_api_key"

    serve(scenario, api_key=("one", "two"))


def test_the_environment_brings_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the variable's value is the key, unless the option sets another."""
    monkeypatch.setenv("TP_ENGINE_API_KEY", "of-the-environment")
    assert ServerConfig().api_keys == ("of-the-environment",)
    assert ServerConfig(api_key="mine").api_keys == ("mine",)  # type: ignore[arg-type]
    assert public_fields(ServerConfig(api_key=("mine",)))["api_key"] == "hidden"


def test_the_root_path_is_open_where_the_server_is() -> None:
    """Oracle: a proxy that strips the prefix, and one that keeps it."""

    async def scenario(app: App) -> None:
        for path in ("/health", "/llm/health"):
            assert (await app.get(path)).status == 200, path
        assert (await app.get("/llm/v1/models")).status == 401
        key = {"Authorization": "Bearer one"}
        assert (await app.start("GET", "/llm/v1/models", **key).reply()).status == 200
        described = (await app.start("GET", "/openapi.json", **key).reply()).json()
        assert described["servers"] == [{"url": "/llm"}] and described["info"]["version"] == __version__

    serve(scenario, api_key=("one",), root_path="/llm")


def test_origins() -> None:
    """Oracle: without the option, pages get no permission; with it, the named origin gets it, before the key is
    checked."""
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    async def closed(app: App) -> None:
        reply = await app.start("OPTIONS", "/v1/completions", **asked).reply()
        assert "access-control-allow-origin" not in reply.headers

    async def opened(app: App) -> None:
        reply = await app.start("OPTIONS", "/v1/completions", **asked).reply()
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://a.example"
        reply = await app.start("OPTIONS", "/v1/completions", **{**asked, "Origin": "https://b.example"}).reply()
        assert "access-control-allow-origin" not in reply.headers
        refused = await app.start("GET", "/v1/models", Origin="https://a.example").reply()
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"

    serve(closed)
    serve(opened, allowed_origins='["https://a.example"]', api_key=("one",))


def test_docs_can_be_taken_away() -> None:
    """Oracle: 404 for all three; by default the schema lists the completions."""

    async def there(app: App) -> None:
        assert "/v1/completions" in (await app.get("/openapi.json")).json()["paths"]
        assert (await app.get("/docs")).status == 200

    async def gone(app: App) -> None:
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert (await app.get(path)).status == 404

    serve(there)
    serve(gone, disable_fastapi_docs=True)


def test_a_unix_socket_is_bound_replaced_and_removed(tmp_path: Path) -> None:
    """Oracle: the file; a dead server's file is replaced; a file in use, or of another kind, is not."""
    config = ServerConfig(uds=str(tmp_path / "s"))
    with open_listener(config) as listener:
        assert listener_url(listener, "/llm") == "http://localhost/llm"
        with pytest.raises(OSError, match="in use by another program"):
            open_listener(config)
    open_listener(config).close()
    assert os.path.exists(tmp_path / "s")
    close_listener(config)
    close_listener(config)
    assert not os.path.exists(tmp_path / "s")
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="another kind"):
        open_listener(config)
    with pytest.raises(ConfigError, match="cannot listen on uds"):
        open_listener(ServerConfig(uds=str(tmp_path / "none" / "s")))
    with pytest.raises(ConfigError, match="cannot listen on uds"):
        open_listener(ServerConfig(uds=str(tmp_path / ("x" * 200))))


def test_certificates_are_read_before_anything_is_started(tmp_path: Path) -> None:
    """Oracle: an error that names both files."""
    for name in ("key", "cert"):
        (tmp_path / name).write_text("no PEM")
    config = ServerConfig(port=0, ssl_keyfile=str(tmp_path / "key"), ssl_certfile=str(tmp_path / "cert"))
    with pytest.raises(ConfigError, match=r"ssl_certfile .*cert.* and ssl_keyfile .*key.* cannot be used"):
        open_listener(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": __file__}, "needs both ssl_keyfile and ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "are of HTTPS"),
        ({"ssl_keyfile": "/no", "ssl_certfile": "/no"}, "there is no such file"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "by name"),
        ({"allowed_origins": "[1"}, "JSON list"),
        ({"api_key": ("",)}, "api_key is not shown"),
        ({"override_generation_config": "[1]"}, "JSON object"),
        ({"override_generation_config": "{"}, "not JSON"),
        ({"override_generation_config": '{"heat": 1}'}, "names 'heat'"),
        ({"uvicorn_log_level": "loud"}, "choose one of"),
        ({"body_timeout_s": 0.0}, "must be positive"),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], words: str) -> None:
    """Oracle: the words of the rule."""
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)


def test_generation_defaults_by_source(tmp_path: Path) -> None:
    """Oracle: the file's fields; overrides take precedence; nothing for vllm."""
    written = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_new_tokens": 7, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    model = str(DEMO_MODEL)
    assert load_generation_defaults(model, source="vllm") == {}
    found = load_generation_defaults(model, source=str(tmp_path), overrides={"temperature": 0.1})
    assert found == {"temperature": 0.1, "top_k": 20, "max_tokens": 7}
    with pytest.raises(ConfigError, match="auto, vllm, or a folder"):
        load_generation_defaults(model, source=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="temperature is -1"):
        load_generation_defaults(model, source="vllm", overrides={"temperature": -1})


def test_a_default_of_max_tokens_is_a_limit() -> None:
    """Oracle: vLLM's rule: the smaller of the requested value and the default."""
    limit = {"max_tokens": 7}
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    assert chat_params(chat, limit).max_tokens == 7
    assert chat_params(chat.model_copy(update={"max_tokens": 3}), limit).max_tokens == 3
    assert chat_params(chat.model_copy(update={"max_tokens": 30}), limit).max_tokens == 7
    completion = CompletionBody.model_validate({"prompt": "x"})
    assert completion_params(completion, limit).max_tokens == 7
    assert completion_params(completion, {"max_tokens": 70}).max_tokens == 16


def test_a_port_is_bound_as_before() -> None:
    """Oracle: a client that connects."""
    with open_listener(ServerConfig(port=0)) as listener:
        socket.create_connection(listener.getsockname(), timeout=5).close()
        assert listener_url(listener, scheme="https").startswith("https://127.0.0.1:")


def test_a_server_starts_although_its_output_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the line to try is begun, and its failure is none of the server's."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full, config = Full(), ServerConfig(host="127.0.0.1", port=0)
    monkeypatch.setattr(sys, "stdout", full)
    listener = open_listener(config)
    state = SimpleNamespace(model_names=("demo",), healthy_llm=lambda: SimpleNamespace(model_info=MODEL_INFO))
    Frontend._announce(cast("Frontend", SimpleNamespace(_config=config, _listener=listener, _state=state)))
    listener.close()
    assert full.getvalue().startswith("serving demo at http://127.0.0.1:")


def test_threads_that_work_hand_the_interpreter_on() -> None:
    """Oracle: the processor time that a busy thread has while another wakes 40 times, by Python's interval and by the
    server's, in turns: less than half."""
    before_s = sys.getswitchinterval()

    def busy_s() -> float:
        began, ends, spent = threading.Event(), threading.Event(), [0.0]

        def work() -> None:
            began_s = time.thread_time()
            began.set()
            while not ends.is_set():
                sum([number * number for number in range(100)])
            spent[0] = time.thread_time() - began_s

        worker = threading.Thread(target=work)
        worker.start()
        began.wait()
        for _ in range(20):
            time.sleep(1e-4)
        ends.set()
        worker.join()
        return spent[0]

    pythons_s = own_s = 0.0
    try:
        for _ in range(2):
            sys.setswitchinterval(0.005)
            pythons_s += busy_s()
            share_interpreter()
            own_s += busy_s()
    finally:
        sys.setswitchinterval(before_s)
    assert own_s < pythons_s / 2
