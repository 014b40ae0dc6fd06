"""Lines of the log, for people and as JSON, and the request that they name."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine, arith
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.server.config import ServerConfig
from tp_engine.system.log import bind_request, configure_logging, get_logger

logger = get_logger("tp_engine.example")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger("tp_engine")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def lines_of(action: Callable[[], None], log_format: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that ``action`` logs in a process named ``http``."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("http", log_format)
    action()
    return stream.getvalue().splitlines()


def test_text_names_process_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the line without a request, with one, and with one that the line itself names."""

    async def serve() -> None:
        logger.info("before")
        bind_request("abc")
        logger.warning("within %d", 1)
        logger.info("of another", extra={"request_id": "xyz"})

    lines = lines_of(lambda: asyncio.run(serve()), "text", monkeypatch)
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO [http] before",
        "WARNING [http] [request abc] within 1",
        "INFO [http] [request xyz] of another",
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_log_can_not_command_a_terminal(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: what a client sent is seen as text, whatever the line is about."""
    (line,) = lines_of(
        lambda: logger.warning("a tool of the type %s", "\x1b]52;c;aaaa\x07\x9b2J\r\x00"), log_format, monkeypatch
    )
    assert line.isprintable() and "]52;c;aaaa" in line


def test_json_is_one_object_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the fields of docs/metrics.md, also for texts of several lines and errors."""

    async def serve() -> None:
        bind_request("abc", "f" * 32)
        logger.info('two\nlines with "quotes" and é', extra={"fields": {"prompt_tokens": 3}})
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("it failed")

    first, second = map(json.loads, lines_of(lambda: asyncio.run(serve()), "json", monkeypatch))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO", "process": "http", "logger": "tp_engine.example", "message": 'two\nlines with "quotes" and é',
        "request_id": "abc", "trace_id": "f" * 32, "prompt_tokens": 3,
    }  # fmt: skip
    assert second["level"] == "ERROR" and second["exception"].startswith("Traceback")


def test_warnings_of_libraries_look_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a child of the named logger; its warnings appear in our format, its lesser messages do not."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("http", "json", others=("some_library",))
    library = logging.getLogger("some_library.part")
    try:
        library.setLevel(logging.INFO)
        library.info("chatter")
        library.warning("careful")
    finally:
        logging.getLogger("some_library").handlers.clear()
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["logger"], line["message"]) == ("some_library.part", "careful")


def test_tasks_do_not_see_each_others_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: two tasks that take turns, and a task that one of them starts."""

    async def serve(name: str) -> None:
        bind_request(name)
        for _ in range(2):
            await asyncio.sleep(0)
            logger.info("%s", name)
        await asyncio.create_task(after(name))

    async def after(name: str) -> None:
        logger.info("%s", name)

    async def both() -> None:
        await asyncio.gather(serve("a"), serve("b"))

    lines = [json.loads(line) for line in lines_of(lambda: asyncio.run(both()), "json", monkeypatch)]
    assert len(lines) == 6 and all(line["request_id"] == line["message"] for line in lines)


def test_an_unknown_format_is_refused() -> None:
    """Oracle: the error names the value and the choices."""
    with pytest.raises(ConfigError, match=r"log_format is 'xml'; choose one of text, json"):
        EngineConfig(log_format="xml")


def served_lines(
    scenario: Callable[[App], Awaitable[None]], config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, object]]:
    engine = FakeEngine(arith, step_delay_s=0.002)
    action = lambda: run_served(scenario, engine, byte_level_tokenizer(), config)  # noqa: E731
    lines = map(json.loads, lines_of(action, "json", monkeypatch))
    return [line for line in lines if line["logger"] == "tp_engine.server.observation"]


def test_a_line_per_finished_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one line for each of three prompts, with the client's request id, and one for a client that left."""

    async def scenario(app: App) -> None:
        body = {"model": "demo", "max_tokens": 4}
        await app.post("/v1/completions", {**body, "prompt": [[5, 6, 7], [8]]}, **{"x-request-id": "mine"})
        await app.post("/v1/completions", {**body, "prompt": [5], "n": 2, "request_id": "body"})
        leaving = app.start("POST", "/v1/completions", {**body, "prompt": [5], "max_tokens": 900, "stream": True})
        await until(lambda: bool(leaving.parts), "the first event")
        leaving.leave()
        await leaving.ended()

    lines = served_lines(scenario, ServerConfig(enable_log_requests=True), monkeypatch)
    assert len(lines) == 4
    first = {line["prompt_tokens"]: line for line in lines[:2]}[3]
    assert first["request_id"] == "mine" and str(first["engine_request_id"]).startswith("cmpl-mine-0-")
    assert (first["finish_reasons"], first["output_tokens"], first["cached_tokens"]) == (["length"], 4, 0)
    assert 0 <= first["queue_s"] <= first["time_to_first_token_s"] <= first["e2e_s"]  # type: ignore[operator]
    assert "finished: length, 3 prompt tokens (0 cached), 4 generated, queued 0." in str(first["message"])
    assert (lines[2]["request_id"], lines[2]["finish_reasons"], lines[2]["output_tokens"]) == (
        "body",
        ["length"] * 2,
        8,
    )
    assert lines[3]["finish_reasons"] == ["abort"] and lines[3]["queue_s"] is None


def test_no_line_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an empty list."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", {"model": "demo", "prompt": [5], "max_tokens": 2})

    assert served_lines(scenario, ServerConfig(), monkeypatch) == []
