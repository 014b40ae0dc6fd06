"""Spans: one per prompt, below the caller's, with the attributes that vLLM's users query."""

from __future__ import annotations

import http.server
import importlib.util
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.asgi import App, run_served, until
from tests.fake_engine import MODEL_INFO, FakeEngine, arith
from tests.images import image_info, image_part, image_tokenizer, picture
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import ConfigError
from tp_engine.server import tracing
from tp_engine.server.config import ServerConfig
from tp_engine.server.tracing import RequestTracer, check_tracing
from tp_engine.system.version import __version__

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9}
LATENCIES = (
    "time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode",
    "time_in_model_inference",
)  # fmt: skip


def spans_of(
    *requests: tuple[dict[str, object], dict[str, str]],
    leaves: bool = False,
    path: str = "/v1/completions",
    info: ModelInfo = MODEL_INFO,
) -> list[ReadableSpan]:
    """The spans of these requests, bodies and headers; in ``leaves`` the client leaves after the first event."""
    exporter = InMemorySpanExporter()

    async def scenario(app: App) -> None:
        app.state.tracer = RequestTracer(exporter, "demo")
        for body, headers in requests:
            exchange = app.start("POST", path, body, **headers)
            if leaves:
                await until(lambda: bool(exchange.parts), "the first event")  # noqa: B023
                exchange.leave()
            await exchange.ended()

    tokenizer = byte_level_tokenizer() if info.images is None else image_tokenizer()
    run_served(scenario, FakeEngine(arith, step_delay_s=0.002, model_info=info), tokenizer)
    return list(exporter.get_finished_spans())


def test_a_span_has_the_requests_figures() -> None:
    """Oracle: vLLM's attribute names; the request's own fields and token counts; times that add up."""
    before_ns = time.time_ns()
    (span,) = spans_of((BODY, {}))
    attributes = dict(span.attributes or {})
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert span.start_time is not None and span.end_time is not None
    assert before_ns - 10**6 <= span.start_time <= span.end_time <= time.time_ns()
    expected = {
        "gen_ai.request.model": "demo", "gen_ai.response.model": "demo", "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 4, "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4, "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert {name: attributes[name] for name in expected} == expected
    assert str(attributes["gen_ai.request.id"]).startswith("cmpl-")
    queue, first, e2e, prefill, decode, inference = (float(attributes[f"gen_ai.latency.{n}"]) for n in LATENCIES)  # type: ignore[arg-type]
    assert 0 <= queue <= first <= e2e and prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(e2e)
    assert span.resource.attributes["service.version"] == __version__


def test_the_images_of_a_prompt_have_a_span_of_their_own() -> None:
    """Oracle: the request's span, and within it the one in which two pictures of 6 tokens were read."""
    content = [image_part(picture(96, 64)), image_part(picture(96, 64))]
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    load, request = spans_of((chat, {}), path="/v1/chat/completions", info=image_info())
    attributes = dict(request.attributes or {})
    assert (attributes["tp_engine.images"], attributes["tp_engine.image_tokens"]) == (2, 12)
    assert (load.name, request.name) == ("load_images", "llm_request")
    assert load.parent is not None and request.context is not None and load.parent.span_id == request.context.span_id
    times = [request.start_time, load.start_time, load.end_time, request.end_time]
    assert times[1:] == sorted(times[1:]), times  # type: ignore[type-var]


def test_the_callers_trace_goes_on() -> None:
    """Oracle: the ids in the traceparent header; an invalid header begins a new trace."""
    good = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "a=1"}
    with_parent, without = spans_of((BODY, good), (BODY, {"traceparent": "nonsense"}))
    assert with_parent.parent is not None and with_parent.context is not None and without.context is not None
    assert f"{with_parent.context.trace_id:032x}" == TRACE_ID and f"{with_parent.parent.span_id:016x}" == PARENT_ID
    assert with_parent.context.trace_state.get("a") == "1"
    assert without.parent is None and f"{without.context.trace_id:032x}" != TRACE_ID


def test_a_span_for_every_prompt_and_for_those_who_leave() -> None:
    """Oracle: two prompts, two spans of one trace; for a client that left, the reason and no times of a whole
    answer."""
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    spans = spans_of(({**BODY, "prompt": [[1, 2], [3]]}, headers))
    assert sorted((span.attributes or {})["gen_ai.usage.prompt_tokens"] for span in spans) == [1, 2]  # type: ignore[type-var]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE_ID}
    (left,) = spans_of(({**BODY, "max_tokens": 900, "stream": True}, {}), leaves=True)
    assert (left.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.e2e" not in (left.attributes or {})


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP endpoint that accepts everything: its URL and what it received."""
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_spans_reach_a_collector(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an HTTP server that accepts OTLP; closing sends the remaining spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    url, got = collector

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", BODY)

    run_served(scenario, FakeEngine(arith), byte_level_tokenizer(), ServerConfig(otlp_traces_endpoint=url))
    ((path, data),) = got
    assert path == "/v1/traces" and b"llm_request" in data and b"my-service" in data


def test_what_can_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the errors name the protocol, the extra, the URL."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="is 'smoke'; it must be grpc"):
        check_tracing()
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'localhost:4317'; it must be a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")

    def nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(ConfigError, match=r"pip install 'tp-engine\[otel\]'"):
        tracing.check_tracing()
