"""OpenTelemetry: one span per prompt, with vLLM's attribute names and those of the GenAI conventions.

The packages are an extra; without ``--otlp-traces-endpoint`` none of them is imported.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tp_engine.errors import ConfigError
from tp_engine.images.staged import StagedImage
from tp_engine.requests.outputs import RequestMetrics
from tp_engine.requests.request import EngineRequest
from tp_engine.system import env
from tp_engine.system.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
IMAGES_SPAN_NAME = "load_images"
_CLOSE_S = 2.0
_NS = 1_000_000_000


def check_tracing() -> None:
    """Raise ``ConfigError`` if the extra is missing, or the environment names an unknown protocol."""
    try:
        found = importlib.util.find_spec("opentelemetry.sdk") and importlib.util.find_spec("opentelemetry.exporter")
    except ModuleNotFoundError:
        found = None
    if not found:
        raise ConfigError(
            "otlp_traces_endpoint is set but OpenTelemetry is not installed; pip install 'tp-engine[otel]', or leave "
            "the option out"
        )
    if (protocol := env.OTLP_PROTOCOL.read()) not in ("grpc", "http/protobuf"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}; it must be grpc (the default) or http/protobuf"
        )


class RequestTracer:
    """Sends spans in batches from a separate thread; an unreachable collector does not delay requests."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": env.OTEL_SERVICE_NAME.read(), "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tp_engine", __version__)
        self._model_name = model_name

    @classmethod
    def to_endpoint(cls, endpoint: str, model_name: str) -> RequestTracer:
        """A tracer for an OTLP collector, by gRPC or ``http/protobuf`` (``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``)."""
        return cls(_exporter(endpoint), model_name)

    def record(
        self,
        request: EngineRequest,
        carrier: Mapping[str, str],
        *,
        num_output_tokens: Sequence[int],
        num_cached_tokens: int,
        reasons: Sequence[str],
        times: RequestMetrics | None,
    ) -> None:
        """Send the span of a request that has ended; ``carrier`` has the caller's ``traceparent``.

        ``num_output_tokens`` has one entry per sequence, ``reasons`` one per sequence that ended.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=end_ns - int((time.monotonic() - request.arrival_s) * _NS),
            attributes={
                **_attributes(request, self._model_name, num_output_tokens, num_cached_tokens, times),
                "gen_ai.response.finish_reasons": list(reasons),
            },
        )
        if "error" in reasons:
            span.set_status(Status(StatusCode.ERROR, "generation failed"))
        if request.images and isinstance(image := request.images[0], StagedImage):
            began_ns, ended_ns = (end_ns - int((time.monotonic() - one) * _NS) for one in image.loading_s)
            load = self._tracer.start_span(IMAGES_SPAN_NAME, set_span_in_context(span), start_time=began_ns)
            load.end(ended_ns)
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        # The shutdown may wait for the collector; a daemon thread does not delay the end of the process.
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _exporter(endpoint: str) -> SpanExporter:
    check_tracing()
    if env.OTLP_PROTOCOL.read() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter: SpanExporter = GrpcExporter(endpoint=endpoint)
        return exporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


def _attributes(
    request: EngineRequest,
    model_name: str,
    num_output_tokens: Sequence[int],
    num_cached: int,
    times: RequestMetrics | None,
) -> dict[str, Any]:
    """What was asked for, the tokens used, and the times taken."""
    params, images = request.params, request.images
    num_prompt, num_output = len(request.prompt_token_ids), sum(num_output_tokens)
    asked = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if request.request_id.startswith("cmpl-") else "chat",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": params.n,
        **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": num_cached,
        "gen_ai.usage.num_sequences": len(num_output_tokens),
    }
    if images:
        num_image_tokens = sum(image.num_tokens for image in images)
        found |= {"tp_engine.images": len(images), "tp_engine.image_tokens": num_image_tokens}
    if times is not None:
        found |= {
            "gen_ai.latency.time_in_queue": times.queue_s,
            "gen_ai.latency.time_to_first_token": times.ttft_s,
            "gen_ai.latency.e2e": times.e2e_s,
            "gen_ai.latency.time_in_model_prefill": times.ttft_s - times.queue_s,
            "gen_ai.latency.time_in_model_decode": times.e2e_s - times.ttft_s,
            "gen_ai.latency.time_in_model_inference": times.e2e_s - times.queue_s,
        }
    return found
