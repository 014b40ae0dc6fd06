"""Chats and completions at a terminal, against a small HTTP server of the test's own."""

from __future__ import annotations

import itertools
import json
import threading
import tomllib
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tp_engine.api import server_client
from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.chat import command as chat
from tp_engine.apps.chat.command import ChatConfig, Conversation, converse
from tp_engine.apps.chat.session import ClientConfig
from tp_engine.cli.main import main
from tp_engine.errors import ConfigError

KEY = "secret"
MODEL = "demo"


class Handler(BaseHTTPRequestHandler):
    """Streams the last message or the prompt back, one letter per chunk; ``fail`` gets an error, ``break`` is cut
    off."""

    server: StubServer

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": MODEL}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._json(401, {"error": {"message": "missing or wrong API key"}})
            return
        is_chat = self.path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if isinstance(text, list):
            text = text[-1]["text"]
        if text == "fail":
            self._json(400, {"error": {"message": "prompt is bad; send another"}})
            return
        self.send_response(200)
        self.end_headers()
        for number, letter in enumerate(text):
            reason = "length" if number == len(text) - 1 and text.endswith("!") else None
            piece = {"delta": {"content": letter}} if is_chat else {"text": letter}
            self._event({"choices": [piece | {"finish_reason": reason}]})
        if text != "break":
            self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, content: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _json(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class StubServer(ThreadingHTTPServer):
    """Keeps the bodies of its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Terminal:
    """The lines that a person types, and all output."""

    def __init__(self, lines: Sequence[str | type[BaseException]]) -> None:
        self._lines = iter(lines)
        self.shown = ""
        self.told: list[str] = []
        self.interrupt_after: int | None = None

    def ask(self, _prompt: str) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def show(self, text: str) -> None:
        self.shown += text
        if self.interrupt_after is not None and len(self.shown) >= self.interrupt_after:
            self.interrupt_after = None
            raise KeyboardInterrupt


def conversation(server: StubServer, terminal: Terminal, **options: Any) -> Conversation:
    client = ServerClient(server.url, api_key=KEY, timeout_s=10.0)
    return Conversation(client, MODEL, ChatConfig(**options), terminal.show)


def test_a_conversation_remembers_and_forgets(stub: StubServer) -> None:
    """Oracle: the messages that the server got, and the output."""
    terminal = Terminal(["hello", "", "again!", "/reset", "/rest", "/help", "new", "/exit", "never sent"])
    converse(
        conversation(stub, terminal, system_prompt="be brief", temperature=0.5), terminal.ask, terminal.told.append
    )
    system, hello = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    assert [body["messages"] for body in stub.bodies] == [
        [system, hello],
        [system, hello, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "again!"}],
        [system, {"role": "user", "content": "new"}],
    ]
    assert all(body["temperature"] == 0.5 and body["stream"] and body["model"] == MODEL for body in stub.bodies)
    assert terminal.shown == "hello\nagain!\nnew\n"
    assert "cut off" in terminal.told[0] and terminal.told[1] == "(forgotten)"
    assert terminal.told[2] == "unknown command /rest; did you mean /reset?" and "/exit" in terminal.told[3]


def test_ctrl_c_stops_an_answer_and_keeps_what_came(stub: StubServer) -> None:
    """Oracle: the next request has the start of the interrupted answer; Ctrl-C at the prompt shows a new prompt."""
    terminal = Terminal(["a long answer", KeyboardInterrupt, "go on"])
    terminal.interrupt_after = 6
    converse(conversation(stub, terminal), terminal.ask, terminal.told.append)
    assert terminal.shown == "a long\ngo on\n" and terminal.told == ["(stopped)", ""]
    answers = [message["content"] for message in stub.bodies[1]["messages"] if message["role"] == "assistant"]
    assert answers == ["a long"]


@pytest.mark.parametrize(
    ("text", "told"), [("fail", "prompt is bad; send another"), ("break", "closed the connection before")]
)
def test_a_failed_answer_leaves_the_conversation_as_it_was(stub: StubServer, text: str, told: str) -> None:
    """Oracle: the error in the server's own words; the next request lacks the failed message."""
    terminal = Terminal([text, "fine"])
    converse(conversation(stub, terminal), terminal.ask, terminal.told.append)
    assert told in terminal.told[0]
    assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "fine"}]


def test_quick_answers(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exactly the answer on standard output; without an answer, exit code 1 and the reason."""
    common = ["--url", stub.url + "/v1", "--api-key", KEY]
    assert main(["chat", *common, "-q", "hi there", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "hi there\n" and stub.bodies[0]["max_tokens"] == 7
    assert main(["complete", *common, "--model", "other", "-q", "once"]) == 0
    assert capsys.readouterr().out == "once\n" and stub.bodies[1]["model"] == "other"
    assert main(["complete", *common, "--model", "absent", "-q", "once"]) == 1
    assert "has no model 'absent'; it has demo, other" in capsys.readouterr().err
    assert main(["chat", "--url", stub.url, "--api-key", "wrong", "-q", "hi"]) == 1
    assert "missing or wrong API key" in capsys.readouterr().err


def test_lines_from_a_file(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: one answer per line, until the end of the input."""
    for name in ("chat", "complete"):
        lines = iter(["one", "two"])
        monkeypatch.setattr(chat, "ask_person", lambda prompt, lines=lines: _next_line(lines))
        assert main([name, "--url", stub.url, "--api-key", KEY]) == 0
        assert capsys.readouterr().out == "one\ntwo\n"


def _next_line(lines: Iterator[str]) -> str:
    line = next(lines, None)
    if line is None:
        raise EOFError
    return line


def test_a_server_that_is_not_there() -> None:
    """Oracle: the address in the error."""
    with StubServer() as server:
        url = server.url
    with pytest.raises(ServerError, match=f"{url} cannot be reached"):
        ServerClient(url).model()


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_configuration_is_printed_instead(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the flag's help; no server listens at that address."""
    assert main([command, "--url", "http://127.0.0.1:9", "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)[command]["url"] == "http://127.0.0.1:9"


def test_options_of_answers() -> None:
    """Oracle: only the given options are sent."""
    assert ClientConfig(temperature=0.0, max_tokens=3).sampling == {"temperature": 0.0, "max_tokens": 3}
    assert ClientConfig().sampling == {}


def test_images_are_shown_with_the_first_message(stub: StubServer, tmp_path: Path) -> None:
    """Oracle: the bodies: a data URL of the file, also after an error, then texts alone; a file that is not there is an
    error before."""
    file = tmp_path / "a.png"
    file.write_bytes(b"a picture")
    talk = conversation(stub, Terminal([]), image=(str(file),))
    with pytest.raises(ServerError):
        talk.say("fail")
    talk.say("look")
    talk.say("again")
    image, text = stub.bodies[1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "look"} and image["type"] == "image_url"
    assert image["image_url"]["url"].endswith(";base64,YSBwaWN0dXJl")
    assert stub.bodies[2]["messages"][-1]["content"] == "again"
    with pytest.raises(ConfigError, match=r"image is .*absent.*cannot be read"):
        conversation(stub, Terminal([]), image=(str(tmp_path / "absent"),))


CHAT_PATH, MODELS_PATH = "/v1/chat/completions", "/v1/models"


class HostileHandler(BaseHTTPRequestHandler):
    """Answers each path with what ``server.answers`` has for it; ``{"data": [{"id": "m"}]}`` by default."""

    server: HostileServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for piece in self.server.answers.get(self.path, [b'{"data": [{"id": "m"}]}']):
                self.wfile.write(piece)
        except ConnectionError:
            self.server.was_left = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class HostileServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HostileHandler)
        self.answers: dict[str, Any] = {}
        self.was_left = False
        self.client = ServerClient(f"http://127.0.0.1:{self.server_address[1]}", timeout_s=10.0)


@pytest.fixture
def hostile() -> Iterator[HostileServer]:
    with HostileServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


NO_MODELS = [
    b"<html>log in</html>",
    b"[]",
    b'{"data": [1]}',
    b'{"data": [{"id": 7}]}',
    b"[" * 60000,
    b"",
    b"\xff\xfe",
    b"{}",
]
NO_CHUNKS = [b"{not json", b"[1]", b'{"a": 1}', b'{"choices": 1}', b'{"choices": [1]}', b'{"choices": [{"delta": []}]}',
             b'{"choices": [{"delta": {"content": 5}}]}', b"[" * 60000]  # fmt: skip


@pytest.mark.parametrize("answer", NO_MODELS, ids=lambda answer: str(answer[:12]))
def test_a_list_of_models_that_is_none(hostile: HostileServer, answer: bytes) -> None:
    """By hand: one error that shows the beginning of the answer."""
    hostile.answers[MODELS_PATH] = [answer]
    with pytest.raises(ServerError, match=r"/v1/models answered with .* which is not of OpenAI's API"):
        hostile.client.model()


def test_a_server_without_models(hostile: HostileServer) -> None:
    """By hand."""
    hostile.answers[MODELS_PATH] = [b'{"data": []}']
    with pytest.raises(ServerError, match=r"has no model$"):
        hostile.client.model()


@pytest.mark.parametrize("chunk", NO_CHUNKS, ids=lambda chunk: str(chunk[:12]))
def test_a_chunk_that_is_none(hostile: HostileServer, chunk: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the command ends with code 1 and one error, no traceback."""
    hostile.answers[CHAT_PATH] = [b"data: " + chunk + b"\n\n"]
    assert main(["chat", "--url", hostile.client.url, "-q", "hi"]) == 1
    said = capsys.readouterr().err
    assert "/v1/chat/completions answered with" in said and "Traceback" not in said


@pytest.mark.parametrize("path", [MODELS_PATH, CHAT_PATH])
def test_an_answer_without_end(hostile: HostileServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: what is read has a limit, and the server sees that the client has left."""
    monkeypatch.setattr(server_client, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(server_client, "MOST_LINE_BYTES", 1 << 20)
    hostile.answers[path] = itertools.chain([b"data: "], itertools.repeat(b" " * 65536))
    with pytest.raises(ServerError, match=r"more than \d+ MiB"):
        for _ in hostile.client.stream(path, {}) if path == CHAT_PATH else [hostile.client.model()]:
            pass
    hostile.shutdown()
    hostile.server_close()
    assert hostile.was_left


def test_a_stream_without_end(hostile: HostileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: small lines count together."""
    monkeypatch.setattr(server_client, "MOST_STREAM_BYTES", 1 << 20)
    hostile.answers[CHAT_PATH] = itertools.repeat(b": a comment\n" * 5000)
    with pytest.raises(ServerError, match=r"MiB in all"):
        list(hostile.client.stream(CHAT_PATH, {}))


def test_an_answer_can_not_command_the_terminal(hostile: HostileServer, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a title, the clipboard, a cleared screen and hidden text are seen as text; tabs and line ends stay."""
    evil = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31mred\x1b[8m hidden\r\tend\n\x00\x7f"
    chunk = {"choices": [{"delta": {"content": evil}, "finish_reason": "stop"}]}
    hostile.answers[CHAT_PATH] = [b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"]
    assert main(["chat", "--url", hostile.client.url, "-q", "hi"]) == 0
    shown = capsys.readouterr().out
    assert shown == "␛]0;title␇␛]52;c;ZXZpbA==␇␛[2J�31mred␛[8m hidden\tend\n␀�\n"
    hostile.answers[CHAT_PATH] = [b'data: {"error": {"message": "\\u001b[2Jno"}}\n\n']
    hostile.answers[MODELS_PATH] = [b'{"data": [{"id": "\\u001b[2Jm"}]}']
    assert main(["chat", "--url", hostile.client.url, "-q", "hi"]) == 1
    assert main(["chat", "--url", hostile.client.url, "--model", "n", "-q", "hi"]) == 1
    assert "\x1b" not in "".join(capsys.readouterr())
