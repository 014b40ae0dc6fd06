"""One request between its first and its last delta: its sequences, log-probabilities and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tp_engine.api.scored_tokens import PromptLogprobs, ScoredRun, ScoredTokens
from tp_engine.engine.sequence_text import SequenceText, hidden_ids
from tp_engine.engine.token_texts import TokenTexts
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.plan import FloatArray, TokenLogprobs
from tp_engine.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta


@dataclass(slots=True, kw_only=True)
class SequenceUpdate(CompletionOutput):
    """What one or several steps add to a sequence.

    ``finish_reason`` is None while it runs; ``stop_reason`` is the stop token id or stop string that ended it.
    ``num_output_tokens`` counts all tokens of the sequence up to here.  ``error`` says what went wrong if
    ``finish_reason`` is ``error``, and ``error_code`` is set if the request caused it.  ``num_draft_tokens`` and
    ``num_accepted_tokens`` are those of the sequence, as far as they are known.  ``prompt_logprobs`` come once for a
    request, when its prompt is computed; ``request_output`` comes with the update that ends the whole request.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: ScoredTokens | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    error: str | None = None
    error_code: str | None = None
    request_output: RequestOutput | None = None

    def append(self, later: SequenceUpdate) -> None:
        """Add the next update of the same sequence to this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.append(later.logprobs)
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.error_code = later.error, later.error_code
        self.request_output = later.request_output
        self.num_draft_tokens, self.num_accepted_tokens = later.num_draft_tokens, later.num_accepted_tokens

    def as_output(self, request: EngineRequest, prompt: str | None) -> RequestOutput:
        """What is new, as an output of ``request`` without anything else."""
        last = self.request_output
        new = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[new],
            finished=last is not None,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=None if last is None else last.prompt_logprobs,
            metrics=None if last is None else last.metrics,
        )


class _SequenceState:
    """One of the ``n`` sequences, from its first record on."""

    def __init__(self, index: int, request: EngineRequest, decoder: TokenDecoder | None) -> None:
        self._text = None if decoder is None else SequenceText(decoder, request.params)
        self._pieces: list[str] = []
        self._scored: ScoredRun | None = None
        self.output = CompletionOutput(index=index, text="", token_ids=[])
        if request.params.logprobs is not None:
            texts = None if decoder is None else TokenTexts(decoder, hidden_ids(decoder, request.params))
            self._scored = ScoredRun(request.params.logprobs, texts)
            self.output.logprobs, self.output.cumulative_logprob = ScoredTokens(self._scored), 0.0

    def add(self, token_ids: list[int], delta: SequenceDelta | None) -> tuple[str, int]:
        """Add tokens; returns the new text and the number of new tokens: further ones follow a stop string."""
        text, num_tokens, output = "", len(token_ids), self.output
        reason = None if delta is None else delta.finish_reason
        if delta is not None and reason is not None:
            output.finish_reason, output.stop_reason = reason.value, delta.stop_reason
        if self._text is not None:
            ends_with_stop_token = reason is FinishReason.STOP and not (delta is not None and delta.ends_with_text)
            text, num_tokens = self._text.push(
                token_ids, ends_with_stop_token=ends_with_stop_token, is_last=reason is not None
            )
            self._pieces.append(text)
            if self._text.stop_string is not None:
                output.finish_reason, output.stop_reason = FinishReason.STOP.value, self._text.stop_string
        output.token_ids += token_ids[:num_tokens]
        if delta is not None and delta.num_draft_tokens:
            output.num_draft_tokens, output.num_accepted_tokens = delta.num_draft_tokens, delta.num_accepted_tokens
        return text, num_tokens

    def add_logprobs(self, logprobs: TokenLogprobs, num_tokens: int) -> ScoredTokens | None:
        """Keep and return those of the new tokens; None if the request asked for none."""
        if self._scored is None:
            return None
        assert self.output.cumulative_logprob is not None
        new = self._scored.length
        self._scored.add(logprobs, num_tokens)
        self.output.logprobs = ScoredTokens(self._scored)
        for logprob in logprobs.logprobs[:num_tokens, 0].tolist():  # one by one: the sum's bits depend on the order
            self.output.cumulative_logprob += logprob
        return ScoredTokens(self._scored, new)

    def so_far(self) -> CompletionOutput:
        """A copy with all text and tokens until now."""
        return replace(self.output, text="".join(self._pieces), token_ids=list(self.output.token_ids))


@dataclass(slots=True)
class _Times:
    """time.monotonic() of a request's events; 0.0 until they happen."""

    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def metrics(self, arrival_s: float, num_tokens: int, now_s: float) -> RequestMetrics:
        """``num_tokens`` are the longest sequence's; an event that never happened counts as happening now."""
        decode_s = self.last_token_s - self.first_token_s
        return RequestMetrics(
            arrival_s=arrival_s,
            queue_s=(self.first_scheduled_s or now_s) - arrival_s,
            ttft_s=(self.first_token_s or now_s) - arrival_s,
            tpot_s=decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0,
            e2e_s=now_s - arrival_s,
        )


class RequestState:
    """A request and its ``n`` sequences.

    Texts stay empty without a ``decoder``, and if the request wants none.  ``finished`` and ``runs_in_engine`` differ
    where a stop string ended a sequence here, before the engine knows.
    """

    def __init__(self, request: EngineRequest, prompt: str | None, decoder: TokenDecoder | None) -> None:
        self.request = request
        self.prompt = prompt
        self.decoder = decoder if request.params.detokenize else None
        self._sequences: dict[int, _SequenceState] = {}  # those that have begun
        self._num_unfinished = self._num_running = request.params.n
        self._num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._pooled: FloatArray | None = None
        self._times = _Times()

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return self._num_unfinished == 0

    @property
    def runs_in_engine(self) -> bool:
        """Whether the engine has yet to report the end of a sequence."""
        return self._num_running > 0

    def apply(self, delta: SequenceDelta, now_s: float) -> SequenceUpdate | None:
        """Apply a delta; returns what it adds, None if its sequence has ended already."""
        if delta.finish_reason is not None:
            self._num_running -= 1
        update = self.add(delta.index, delta.new_token_ids, now_s, delta)
        if update is None:
            return None
        self._times.first_scheduled_s = self._times.first_scheduled_s or delta.first_scheduled_s
        self._num_cached_tokens = update.num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if delta.pooled is not None:
            self._pooled = delta.pooled
        if delta.logprobs is not None:
            update.logprobs = self._sequence(delta.index).add_logprobs(delta.logprobs, len(update.token_ids))
        update.prompt_logprobs = self._new_prompt_logprobs(delta)
        update.error, update.error_code = delta.error, delta.error_code
        return update

    def add(
        self, index: int, token_ids: list[int], now_s: float, delta: SequenceDelta | None = None
    ) -> SequenceUpdate | None:
        """Add ``token_ids``, perhaps only a part of ``delta``; returns what they add, None if the sequence has
        ended."""
        sequence, times = self._sequence(index), self._times
        output = sequence.output
        if output.finish_reason is not None:
            return None
        text, num_tokens = sequence.add(token_ids, delta)
        if token_ids:
            times.first_token_s, times.last_token_s = times.first_token_s or now_s, now_s
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        return SequenceUpdate(
            request_id=self.request.request_id,
            index=index,
            text=text,
            token_ids=token_ids[:num_tokens],
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
        )

    def _sequence(self, index: int) -> _SequenceState:
        sequence = self._sequences.get(index)
        if sequence is None:
            sequence = self._sequences[index] = _SequenceState(index, self.request, self.decoder)
        return sequence

    def _new_prompt_logprobs(self, delta: SequenceDelta) -> PromptLogprobs | None:
        """Keep and return those of the prompt, which come with the first delta of sequence 0."""
        num_alternatives, token_ids = self.request.params.prompt_logprobs, self.request.prompt_token_ids
        if num_alternatives is None or delta.index > 0 or self._prompt_logprobs is not None:
            return None
        if 1 + sum(len(part.token_ids) for part in delta.prompt_logprobs) >= len(token_ids):  # else aborted before
            self._prompt_logprobs = PromptLogprobs(delta.prompt_logprobs, token_ids, num_alternatives, self.decoder)
        return self._prompt_logprobs

    def output(self, now_s: float) -> RequestOutput:
        """The request as it stands."""
        completions = [self._sequence(index).so_far() for index in range(self.request.params.n)]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self._times.metrics(self.request.arrival_s, max(len(one.token_ids) for one in completions), now_s),
            pooled=self._pooled,
        )
