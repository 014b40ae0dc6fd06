"""A web page of another origin, in headless Chromium, cannot make a server on this machine do anything."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from tests.e2e.browser import running_browser, tab
from tests.e2e.frontend import INFO, RunningServer, running_server, wait_until
from tests.fake_engine import FakeEngine, arith
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

# All that browsers send without asking the server first, and what they ask about; resolves to what the page sees.
ATTACK = """async (server) => {
    const seen = [];
    const send = async (path, options) => {
        try {
            const answer = await fetch(server + path, { method: "POST", ...options });
            seen.push([path, answer.type, answer.status]);
        } catch (error) {
            seen.push([path, "error", 0]);
        }
    };
    const acts = {
        "/v1/completions": { prompt: "stolen", max_tokens: 2 },
        "/v1/chat/completions": { messages: [{ role: "user", content: "stolen" }] },
        "/tokenize": { prompt: "stolen" },
        "/abort": { abort_all: true },
        "/pause_generation": {},
        "/update_weights_from_disk": { model_path: "/" },
    };
    for (const [path, body] of Object.entries(acts)) {
        const text = JSON.stringify(body);
        await send(path, { mode: "no-cors", body: new Blob([text]) });
        await send(path, { mode: "no-cors", body: text });
        await send(path, { mode: "no-cors", body: new Blob([text], { type: "text/plain" }) });
        await send(path, { body: text, headers: { "Content-Type": "application/json" } });
        navigator.sendBeacon(server + path, new Blob([text]));
    }
    for (const path of ["/sleep", "/pause", "/resume", "/wake_up", "/reset_prefix_cache", "/start_profile"]) {
        await send(path, { mode: "no-cors" });
        await send(path, {});
        navigator.sendBeacon(server + path);
    }
    for (const [path, body] of Object.entries({ ...acts, "/sleep": {}, "/pause": {} })) {
        for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
            const frame = document.createElement("iframe");
            frame.name = path + enctype;
            document.body.append(frame);
            const form = document.createElement("form");
            Object.assign(form, { action: server + path, method: "POST", enctype, target: frame.name });
            const field = form.appendChild(document.createElement("input"));
            [field.name, field.value] = JSON.stringify({ ...body, "": "=" }).split("=");  // NAME=VALUE is JSON
            const loaded = new Promise((resolve) => (frame.onload = resolve));
            document.body.append(form);
            form.submit();
            await loaded;
        }
    }
    return seen;
}"""


@contextlib.contextmanager
def page_of_a_stranger() -> Iterator[int]:
    """A web server for empty pages; its port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a stranger</title><body></body>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    info = msgspec.structs.replace(INFO, max_model_len=1 << 20)
    with running_server(FakeEngine(arith, step_delay_s=0.01, model_info=info), ServerConfig(port=0)) as running:
        yield running


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another_site", "another_port"])
def test_a_page_of_another_origin_changes_nothing(host: str, server: RunningServer) -> None:
    """Oracle: the engine: no new request, no abort, no pause, while a stream of another client goes on."""
    engine, body = server.engine, {"prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    num_before = len(engine.added), len(engine.aborted)
    with (
        running_browser() as browser,
        page_of_a_stranger() as port,
        server.client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with tab(browser, f"http://{host}:{port}") as shown:
            seen = shown.page.evaluate(ATTACK, server.url)
        assert len(seen) == 6 * 4 + 6 * 2
        assert {answer[1] for answer in seen} == {"opaque", "error"}, "no answer can be read"
        assert (len(engine.added), len(engine.aborted)) == (num_before[0] + 1, num_before[1])
        assert (engine.is_paused, engine.is_asleep, engine.orders, engine.trace_folder) == (False, False, [], None)
        num_steps = engine.num_steps
        wait_until(lambda: engine.num_steps > num_steps + 3, "the stream to go on")
    server.wait_idle()
    wait_until(lambda: num_refused(server) > 60, "the requests that the browser sends, some of them when it likes")


def num_refused(server: RunningServer) -> float:
    figures = server.client.get("/metrics").text
    refused = re.search(r'http_requests_total\{.*method="POST".*status="4xx".*\} (\S+)', figures)
    return float(refused[1]) if refused else 0.0


def test_a_name_that_leads_here_reads_nothing(server: RunningServer) -> None:
    """Oracle: 403 after DNS rebinding, which makes the stranger's page one of the same origin."""
    port = server.url.rpartition(":")[2]
    for path in ("/v1/models", "/engine", "/server_info", "/"):
        reply = server.client.get(path, headers={"Host": f"evil.example:{port}"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")
