"""A server with OpenAI's API that adds by rule, and whose tokens are characters: what it answers is known."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "scripted"


def added(text: str) -> str:
    """The sum that a text ends with, as a solver with a step before it writes it."""
    one, other = re.findall(r"(\d+)\+(\d+)=$", text)[0]
    return str(int(one) + int(other))


class ScriptedServer(ThreadingHTTPServer):
    """``answer`` answers the last user message, or a prompt; ``likes`` is the text whose characters have the
    log-probability -1, all others -2; ``refusals`` are statuses that the next answers have."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, answer: Callable[[str], str] = added, likes: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.likes = answer, likes
        self.refusals: list[int] = []
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        if body.get("echo"):
            text = body["prompt"]
            marks = [-1.0 if char in self.likes else -2.0 for char in text]
            tops = [{char: mark, "?": -1.0} for char, mark in zip(text, marks, strict=True)]
            shown = {"tokens": [*text, "!"], "token_logprobs": [None, *marks[1:], -5.0],
                     "text_offset": list(range(len(text) + 1)), "top_logprobs": [None, *tops[1:], {}]}  # fmt: skip
            return {"choices": [{"text": f"{text}!", "logprobs": shown}]}
        if path == "/v1/chat/completions":
            return {"choices": [{"message": {"content": self.answer(body["messages"][-1]["content"])}}]}
        return {"choices": [{"text": self.answer(body["prompt"])}]}


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": NAME}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refusals:
            self._send(self.server.refusals.pop(0), {"error": {"message": "busy"}})
        else:
            self._send(200, self.server.reply(self.path, body))

    def _send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def scripted_server(answer: Callable[[str], str] = added, likes: str = "") -> Iterator[ScriptedServer]:
    """A server that runs in a thread."""
    server = ScriptedServer(answer, likes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)
