"""Beam search: which beams of a prompt survive, how searches run in an engine, and their outputs.

A ``BeamSearch`` asks for requests of one token and never sees the engine:

::

    round     one request per live beam; its prompt is the user's followed by the beam's own tokens
      |         -> per beam the likeliest next tokens with their log-probabilities: the candidates
      |         -> candidates that end with an EOS are complete
      +------ the W likeliest others survive
    end       after max_tokens rounds, or as soon as no live beam can overtake W complete ones

The prefix cache makes this cheap: beams share all full blocks with each other and with the rounds before, and begin
with a copy of their parent's partly filled block, so a round computes one token per beam.  Without the cache every
round computes all tokens.
"""

import asyncio
import dataclasses
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from tqdm import tqdm

from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.sequence_text import SequenceText, hidden_ids
from tp_engine.engine.token_texts import TokenTexts
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.errors import RequestError
from tp_engine.requests.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import BeamSearchParams, SamplingParams

Result = TypeVar("Result")

_MOST_PARTS = 16  # more tokens than the parts of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One beam's output; ``logprobs`` has one position per token; ``finish_reason`` is None while the beam lives."""

    token_ids: list[int]
    cum_logprob: float
    logprobs: list[dict[int, Logprob]]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam and the token that may extend it."""

    cum_logprob: float
    parent: Beam
    token_id: int
    position: dict[int, Logprob]

    def beam(self, finish_reason: FinishReason | None = None) -> Beam:
        return Beam(
            token_ids=[*self.parent.token_ids, self.token_id],
            cum_logprob=self.cum_logprob,
            logprobs=[*self.parent.logprobs, self.position],
            finish_reason=finish_reason,
        )


def one_token(params: BeamSearchParams, **fields: object) -> SamplingParams:
    """The sampling of a search's requests; ``fields`` may set ``cache_salt``, ``logprobs`` and the like."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        include_stop_str_in_output=params.include_stop_str_in_output,
        **fields,  # type: ignore[arg-type]
    )


class BeamSearch:
    """The search of one prompt.  While not ``done``: run ``next_requests``, and ``advance`` with their outputs.

    ``request`` has the user's prompt and the sampling of ``one_token``; the ``n`` best sequences are the answer.
    ``num_cached_tokens`` are the prompt tokens that were in the prefix cache when the search began.
    """

    def __init__(self, request: EngineRequest, params: BeamSearchParams, model: ModelInfo, *, n: int = 1) -> None:
        if request.images:
            raise RequestError("beam search of a prompt with images is not served; leave images out", param="messages")
        self.request = request
        self.params = params
        self.n = n
        self.done = False
        self.num_cached_tokens = 0
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._eos_token_ids = frozenset(() if params.ignore_eos else request.eos_token_ids)
        # Enough that W of them are not EOS.  ``max_logprobs`` limits what users read, not this.
        num_candidates = params.beam_width + max(params.beam_width, len(self._eos_token_ids))
        num_logprobs = max(num_candidates, request.params.logprobs or 0)
        self._sampling = dataclasses.replace(request.params, logprobs=num_logprobs)
        longest = min(model.max_model_len, model.num_blocks * model.block_size + 1)
        self._max_rounds = max(1, min(params.max_tokens, longest - self._num_prompt_tokens))
        self._num_rounds = 0
        self._live = [Beam(token_ids=[], cum_logprob=0.0, logprobs=[])]
        self._complete: list[Beam] = []
        self._end = FinishReason.LENGTH

    @property
    def num_live(self) -> int:
        """Live beams; each is a request of the next round."""
        return len(self._live)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that the next round needs if only the prompt is shared: the most it can need."""
        own = -(-self._num_rounds // block_size) + 1
        return -(-self._num_prompt_tokens // block_size) + self.num_live * own

    def next_requests(self) -> list[EngineRequest]:
        """A request of one token for each live beam; after its first round a search precedes others of its
        priority."""
        priority = self.request.priority - (1 if self._num_rounds else 0)
        return [
            dataclasses.replace(
                self.request,
                request_id=f"{self.request.request_id}-{self._num_rounds}-{number}",
                prompt_token_ids=self.request.prompt_token_ids + beam.token_ids,
                params=self._sampling,
                priority=priority,
                will_continue=self._num_rounds + 1 < self._max_rounds,
                place=number,
            )
            for number, beam in enumerate(self._live)
        ]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Choose the next beams; ``outputs`` are in the order of the requests.  An aborted one ends the search."""
        if self._num_rounds == 0:
            self.num_cached_tokens = outputs[0].num_cached_tokens
        samples = [output.outputs[0] for output in outputs]
        if not all(sample.logprobs for sample in samples):
            self._end, self.done = FinishReason.ABORT, True
            return
        self._num_rounds += 1
        positions = [sample.logprobs[0] for sample in samples if sample.logprobs]
        candidates = [
            _Candidate(beam.cum_logprob + entry.logprob, beam, token_id, position)
            for beam, position in zip(self._live, positions, strict=True)
            for token_id, entry in position.items()
        ]
        ended = [one.beam(FinishReason.STOP) for one in candidates if one.token_id in self._eos_token_ids]
        self._complete = sorted(self._complete + ended, key=self._score, reverse=True)[: self.params.beam_width]
        others = (one for one in candidates if one.token_id not in self._eos_token_ids)
        chosen = heapq.nlargest(self.params.beam_width, others, key=lambda one: one.cum_logprob)
        self._live = [one.beam() for one in chosen]
        self.done = self._num_rounds == self._max_rounds or not self._live or self._is_decided()

    def best(self) -> list[Beam]:
        """The ``beam_width`` best, complete or not, best first, each with a finish reason."""
        cut = [dataclasses.replace(beam, finish_reason=self._end) for beam in self._live]
        return sorted(self._complete + cut, key=self._score, reverse=True)[: self.params.beam_width]

    def _is_decided(self) -> bool:
        """Whether no live beam can overtake the complete ones.

        A beam's sum of log-probabilities can only fall; its best possible score is the present sum over the most
        favourable of the lengths that it may reach.
        """
        if len(self._complete) < self.params.beam_width:
            return False
        lengths = (self._num_prompt_tokens + rounds for rounds in (self._num_rounds, self._max_rounds))
        best = max(self._normalised(self._live[0].cum_logprob, length) for length in lengths)
        return best <= self._score(self._complete[-1])

    def _score(self, beam: Beam) -> float:
        ends_with_eos = beam.finish_reason is FinishReason.STOP
        return self._normalised(beam.cum_logprob, self._num_prompt_tokens + len(beam.token_ids) - ends_with_eos)

    def _normalised(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / math.pow(num_tokens, self.params.length_penalty)


def run_searches(
    searches: Sequence[BeamSearch],
    generate: Callable[[list[EngineRequest]], list[RequestOutput]],
    model: ModelInfo,
    *,
    max_searches: int,
    use_tqdm: bool,
) -> None:
    """Run all searches; ``generate`` completes a list of requests, and at most ``max_searches`` share a round.

    A round takes the first searches, as many as the KV cache holds at once: more would evict each other's blocks from
    the prefix cache, and every round would compute its prompts again.
    """
    unfinished = list(searches)
    with tqdm(total=len(searches), desc="prompts", unit="", disable=not use_tqdm) as progress:
        while unfinished:
            chosen = _that_fit(unfinished[:max_searches], model)
            outputs = iter(generate([request for search in chosen for request in search.next_requests()]))
            for search in chosen:
                search.advance(list(islice(outputs, search.num_live)))
            progress.update(sum(search.done for search in chosen))
            unfinished = [search for search in unfinished if not search.done]


async def run_search(search: BeamSearch, generate: Callable[[EngineRequest], Awaitable[RequestOutput]]) -> None:
    """Run one search; the requests of a round run together, and all end with this task."""
    while not search.done:
        search.advance(await gather_or_cancel([generate(request) for request in search.next_requests()]))


async def gather_or_cancel(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """All results in order.  If one fails, or the caller is cancelled, the others are cancelled before this
    returns."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _that_fit(searches: Sequence[BeamSearch], model: ModelInfo) -> Sequence[BeamSearch]:
    """The first searches whose blocks fit into the pool together, at least one."""
    num_blocks = 0
    for number, search in enumerate(searches):
        num_blocks += search.num_blocks(model.block_size)
        if number > 0 and num_blocks > model.num_blocks:
            return searches[:number]
    return searches


def beam_search_output(search: BeamSearch, decoder: TokenDecoder | None) -> BeamSearchOutput:
    """The best sequences with the prompt before them; texts are empty without a decoder."""
    return BeamSearchOutput(sequences=[_sequence(search, beam, decoder) for beam in search.best()])


def request_output(search: BeamSearch, decoder: TokenDecoder | None) -> RequestOutput:
    """The ``n`` best sequences, best first, without the prompt.

    Positions keep the token's own log-probability and as many others as ``search.request`` asked for.
    """
    request = search.request
    completions = [_completion(search, beam, index, decoder) for index, beam in enumerate(search.best()[: search.n])]
    return RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=completions,
        finished=True,
        num_cached_tokens=search.num_cached_tokens,
    )


def _sequence(search: BeamSearch, beam: Beam, decoder: TokenDecoder | None) -> BeamSearchSequence:
    assert beam.finish_reason is not None
    tokens = search.request.prompt_token_ids + beam.token_ids
    hides_eos = beam.finish_reason is FinishReason.STOP and not search.params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=_with_texts(beam, beam.logprobs, decoder, behind=search.request.prompt_token_ids),
        cum_logprob=beam.cum_logprob,
        text="" if decoder is None else decoder.decode(tokens[: len(tokens) - hides_eos]),
        finish_reason=beam.finish_reason.value,
    )


def _completion(search: BeamSearch, beam: Beam, index: int, decoder: TokenDecoder | None) -> CompletionOutput:
    assert beam.finish_reason is not None
    params, text = search.request.params, ""
    if decoder is not None:
        ends_with_eos = beam.finish_reason is FinishReason.STOP
        text, _ = SequenceText(decoder, params).push(beam.token_ids, ends_with_stop_token=ends_with_eos, is_last=True)
    logprobs = None
    if (num_logprobs := params.logprobs) is not None:
        pairs = zip(beam.token_ids, beam.logprobs, strict=True)
        logprobs = [_position(token_id, position, num_logprobs) for token_id, position in pairs]
        logprobs = _with_texts(beam, logprobs, decoder, hidden=hidden_ids(decoder, params))
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=beam.token_ids,
        finish_reason=beam.finish_reason.value,
        cumulative_logprob=beam.cum_logprob,
        logprobs=logprobs,
    )


def _position(token_id: int, position: Mapping[int, Logprob], num_logprobs: int) -> dict[int, Logprob]:
    """The beam's own token, then the likeliest."""
    likeliest = {other: entry for other, entry in position.items() if (entry.rank or 0) <= num_logprobs}
    return {token_id: position[token_id]} | likeliest


def _with_texts(
    beam: Beam,
    positions: Sequence[dict[int, Logprob]],
    decoder: TokenDecoder | None,
    *,
    behind: Sequence[int] = (),
    hidden: frozenset[int] = frozenset(),
) -> list[dict[int, Logprob]]:
    """``positions`` with the texts of their tokens within the beam, after the tokens ``behind``; rounds know one."""
    if decoder is None:
        return list(positions)
    texts = TokenTexts(decoder, hidden)
    for token_id in behind[-_MOST_PARTS:]:
        texts.take(token_id)
    found = []
    for token_id, position in zip(beam.token_ids, positions, strict=True):
        told = {}
        for other, entry in position.items():
            text, data = texts.of(other)
            told[other] = dataclasses.replace(entry, decoded_token=text, token_bytes=data)
        found.append(told)
        texts.take(token_id)
    return found
