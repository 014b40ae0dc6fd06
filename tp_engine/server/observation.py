"""What operators see of one prompt: metrics, a line in the log, a span."""

import time
from types import TracebackType
from typing import Self

from tp_engine.api.request_state import SequenceUpdate
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.requests.outputs import RequestMetrics, RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.figures import RequestFigures
from tp_engine.server.middleware import trace_carrier
from tp_engine.server.tracing import RequestTracer
from tp_engine.system.log import get_logger

logger = get_logger(__name__)


class Observation:
    """A context manager from acceptance to the last token, or until the client leaves.

    It is for ``num_sequences`` sequences.  ``logs``: log a line at the end.  ``tracer`` gets a span.
    """

    def __init__(
        self,
        figures: RequestFigures,
        request: EngineRequest,
        *,
        num_sequences: int,
        logs: bool,
        tracer: RequestTracer | None,
    ) -> None:
        self._figures = figures
        self._request = request
        self._logs = logs
        self._tracer = tracer
        figures.num_prompt_tokens += len(request.prompt_token_ids)
        figures.num_images += len(request.images)
        figures.num_image_tokens += sum(image.num_tokens for image in request.images)
        self._next_token = figures.histogram(f.NEXT_TOKEN)
        self._start_s = time.monotonic()
        self._num_tokens = [0] * num_sequences
        self._first_s = [0.0] * num_sequences
        self._last_s = [0.0] * num_sequences  # only of those that have a token
        self._reasons: list[str] = []
        self._output: RequestOutput | None = None

    def note(self, update: SequenceUpdate) -> None:
        """Note the engine's next update."""
        self.tick(update.index, len(update.token_ids), update.finish_reason)
        if update.request_output is not None:
            self._output = update.request_output

    def tick(self, index: int, num_tokens: int, finish_reason: str | None) -> None:
        """Note ``num_tokens`` more tokens of sequence ``index``, and its end if there is a ``finish_reason``."""
        now_s = time.monotonic()
        if num_tokens:
            self._figures.num_generation_tokens += num_tokens
            if self._num_tokens[index]:
                self._next_token.observe((now_s - self._last_s[index]) / num_tokens, num_tokens)
            else:
                if not any(self._num_tokens):
                    self._figures.histogram(f.FIRST_TOKEN).observe(now_s - self._start_s)
                self._first_s[index] = now_s
            self._num_tokens[index] += num_tokens
            self._last_s[index] = now_s
        if finish_reason is not None:
            self._reasons.append(finish_reason)
            self._end(index, finish_reason, now_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            return
        missing = len(self._num_tokens) - len(self._reasons)
        if missing:
            reason = FinishReason.ERROR if isinstance(error, EngineDeadError) else FinishReason.ABORT
            self._figures.ends[reason.value] += missing
            self._reasons += [reason.value] * missing
        else:
            num_prompt_tokens = len(self._request.prompt_token_ids)
            self._figures.observe_request(num_prompt_tokens, self._request.params, self._times)
            for num_tokens in self._num_tokens:
                self._figures.lengths.observe(num_prompt_tokens, num_tokens, self._num_cached)
        if self._logs:
            self._log()
        if self._tracer is not None:
            self._tracer.record(
                self._request,
                trace_carrier(),
                num_output_tokens=self._num_tokens,
                num_cached_tokens=self._num_cached,
                reasons=self._reasons,
                times=self._times,
            )

    def _end(self, index: int, reason: str, now_s: float) -> None:
        figures, num_tokens = self._figures, self._num_tokens[index]
        figures.ends[reason] += 1
        figures.histogram(f.E2E).observe(now_s - self._start_s)
        figures.histogram(f.REQUEST_GENERATION).observe(num_tokens)
        if num_tokens > 1:
            decode_s = self._last_s[index] - self._first_s[index]
            figures.histogram(f.PER_TOKEN).observe(decode_s / (num_tokens - 1))

    @property
    def _times(self) -> RequestMetrics | None:
        return None if self._output is None else self._output.metrics

    @property
    def _num_cached(self) -> int:
        return 0 if self._output is None else self._output.num_cached_tokens

    def _log(self) -> None:
        request, times = self._request, self._times
        fields = {
            "engine_request_id": request.request_id,
            "finish_reasons": self._reasons,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": self._num_cached,
            "output_tokens": sum(self._num_tokens),
            "queue_s": None if times is None else round(times.queue_s, 6),
            "time_to_first_token_s": None if times is None else round(times.ttft_s, 6),
            "e2e_s": round(time.monotonic() - request.arrival_s, 6),
        }
        logger.info(
            "%s finished: %s, %d prompt tokens (%d cached), %d generated, queued %s s, first token after %s s, "
            "%.3f s in all",
            request.request_id,
            "+".join(self._reasons),
            fields["prompt_tokens"],
            fields["cached_tokens"],
            fields["output_tokens"],
            _seconds(None if times is None else times.queue_s),
            _seconds(None if times is None else times.ttft_s),
            fields["e2e_s"],
            extra={"fields": fields},
        )


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
