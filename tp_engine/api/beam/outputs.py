"""From the beams of a search to what users get: ``BeamSearchOutput``, or a ``RequestOutput`` as any request has."""

from __future__ import annotations

from collections.abc import Mapping

from tp_engine.api.beam.search import Beam, BeamSearch
from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.engine.sequence_text import SequenceText
from tp_engine.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from tp_engine.request import FinishReason


def beam_search_output(search: BeamSearch, decoder: TokenDecoder | None) -> BeamSearchOutput:
    """The best sequences with the prompt before them; texts are empty without a decoder."""
    return BeamSearchOutput(sequences=[_sequence(search, beam, decoder) for beam in search.best()])


def request_output(search: BeamSearch, decoder: TokenDecoder | None, *, n: int) -> RequestOutput:
    """The ``n`` best sequences, best first, without the prompt.

    Positions keep as many log-probabilities as ``search.request`` asked for, besides that of the token itself.
    """
    request = search.request
    completions = [_completion(search, beam, index, decoder) for index, beam in enumerate(search.best()[:n])]
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
        logprobs=beam.logprobs,
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
