"""What the server counts of requests and their tokens.  Used by the event loop's thread alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric

from tp_engine.outputs import RequestMetrics
from tp_engine.request import FinishReason
from tp_engine.sampling_params import SamplingParams
from tp_engine.server.metrics import families as f
from tp_engine.server.metrics.figures import Histogram, histograms, number, numbers

_HISTOGRAMS = (
    f.FIRST_TOKEN, f.NEXT_TOKEN, f.PER_TOKEN, f.E2E, f.QUEUE, f.PREFILL, f.DECODE, f.INFERENCE, f.REQUEST_PROMPT,
    f.REQUEST_GENERATION, f.PARAMS_N, f.PARAMS_MAX_TOKENS,
)  # fmt: skip
_DEFAULT_MAX_MODEL_LEN = 1 << 20  # before the engine has said


class RequestFigures:
    """Totals since the start."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.ends: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._histograms = {family: Histogram(family.bounds(_DEFAULT_MAX_MODEL_LEN)) for family in _HISTOGRAMS}

    def set_max_model_len(self, max_model_len: int) -> None:
        """Size the histograms of tokens; to be called before the first request."""
        for family in _HISTOGRAMS:
            if family.buckets is None:
                self._histograms[family] = Histogram(family.bounds(max_model_len))

    def histogram(self, family: f.Family) -> Histogram:
        """Where to observe values of ``family``."""
        return self._histograms[family]

    def observe_request(self, num_prompt_tokens: int, params: SamplingParams, times: RequestMetrics | None) -> None:
        """A request, all its ``n`` sequences, has come to its own end; ``times`` where they are known."""
        self.histogram(f.REQUEST_PROMPT).observe(num_prompt_tokens)
        self.histogram(f.PARAMS_N).observe(params.n)
        if params.max_tokens is not None:
            self.histogram(f.PARAMS_MAX_TOKENS).observe(params.max_tokens)
        if times is None:
            return
        self.histogram(f.QUEUE).observe(times.queue_s)
        self.histogram(f.PREFILL).observe(times.ttft_s - times.queue_s)
        self.histogram(f.DECODE).observe(times.e2e_s - times.ttft_s)
        self.histogram(f.INFERENCE).observe(times.e2e_s - times.queue_s)

    def metrics(self, model_name: str) -> Iterator[Metric]:
        """For the exposition."""
        yield number(f.PROMPT_TOKENS, model_name, self.num_prompt_tokens)
        yield number(f.GENERATION_TOKENS, model_name, self.num_generation_tokens)
        yield numbers(f.SUCCESS, model_name, [((reason,), count) for reason, count in self.ends.items()])
        for family, one in self._histograms.items():
            yield histograms(family, model_name, [((), one.bounds, one.counts, one.total)])


class AnswerClock:
    """Times one prompt's sequences."""

    __slots__ = ("_figures", "_first_s", "_last_s", "_next_token", "_start_s", "_tokens")

    def __init__(self, figures: RequestFigures, num_prompt_tokens: int) -> None:
        figures.num_prompt_tokens += num_prompt_tokens
        self._figures = figures
        self._next_token = figures.histogram(f.NEXT_TOKEN)
        self._start_s = time.monotonic()
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()

    def tick(self, index: int, num_tokens: int, finish_reason: str | None) -> None:
        """Sequence ``index`` got ``num_tokens`` more, and perhaps ended."""
        now_s = time.monotonic()
        if num_tokens:
            self._figures.num_generation_tokens += num_tokens
            self._tokens[index] += num_tokens
            last_s = self._last_s.get(index)
            if last_s is not None:
                self._next_token.observe((now_s - last_s) / num_tokens, num_tokens)
            else:
                self._begin(index, now_s)
            self._last_s[index] = now_s
        if finish_reason is not None:
            self._end(index, finish_reason, now_s)

    def leave(self, num_sequences: int, reason: FinishReason) -> None:
        """So many of the sequences will not come to an end of their own."""
        self._figures.ends[reason.value] += num_sequences

    def _begin(self, index: int, now_s: float) -> None:
        if not self._first_s:
            self._figures.histogram(f.FIRST_TOKEN).observe(now_s - self._start_s)
        self._first_s[index] = now_s

    def _end(self, index: int, reason: str, now_s: float) -> None:
        figures, num_tokens = self._figures, self._tokens[index]
        figures.ends[reason] += 1
        figures.histogram(f.E2E).observe(now_s - self._start_s)
        figures.histogram(f.REQUEST_GENERATION).observe(num_tokens)
        if num_tokens > 1:
            decode_s = self._last_s[index] - self._first_s[index]
            figures.histogram(f.PER_TOKEN).observe(decode_s / (num_tokens - 1))
