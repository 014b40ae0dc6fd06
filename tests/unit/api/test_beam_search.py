"""Beam search without a model: invented candidates, and the asynchronous driver against the fake engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import msgspec
import pytest

from tests.fake_engine import MODEL_INFO, FakeEngine, arith, fake_service
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.beam_search import BeamSearch, beam_search_output, one_token, request_output, run_searches
from tp_engine.errors import EngineDeadError
from tp_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import BeamSearchParams

DEADLINE_S = 100.0
EOS = 1
PROMPT = [7, 8, 9]
Model = Callable[[Sequence[int]], Mapping[int, float]]


def search_of(params: BeamSearchParams, *, prompt: Sequence[int] = PROMPT, **info: int) -> BeamSearch:
    request = EngineRequest(
        request_id="search", prompt_token_ids=list(prompt), params=one_token(params), eos_token_ids=(EOS,)
    )
    return BeamSearch(request, params, msgspec.structs.replace(MODEL_INFO, **info))


def output_of(request: EngineRequest, model: Model) -> RequestOutput:
    """The answer of an engine whose model gives these log-probabilities."""
    count = request.params.logprobs
    ranked = sorted(model(request.prompt_token_ids).items(), key=lambda item: -item[1])[:count]
    position = {token: Logprob(logprob=value, rank=rank) for rank, (token, value) in enumerate(ranked, start=1)}
    sample = CompletionOutput(
        index=0, text="", token_ids=[ranked[0][0]], finish_reason="length", logprobs=[position] if position else None
    )
    return RequestOutput(request_id=request.request_id, prompt=None, prompt_token_ids=[], outputs=[sample])


def run(search: BeamSearch, model: Model) -> int:
    """Run to the end; returns the number of rounds."""
    num_rounds = 0
    while not search.done:
        search.advance([output_of(request, model) for request in search.next_requests()])
        num_rounds += 1
    return num_rounds


def made_up(tokens: Sequence[int]) -> dict[int, float]:
    """Log-probabilities of five tokens, which depend on all tokens before."""
    weights = [1.5 + math.sin(31.0 * sum((i + 1) * token for i, token in enumerate(tokens)) + k) for k in range(5)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def everything(max_tokens: int, penalty: float) -> list[tuple[int, ...]]:
    """All sequences that end with the EOS or at the limit, best first, by exhaustion."""
    scored = {}
    for tokens in product(range(5), repeat=max_tokens):
        end = tokens.index(EOS) + 1 if EOS in tokens else max_tokens
        sequence = tokens[:end]
        total = sum(made_up([*PROMPT, *sequence[:i]])[token] for i, token in enumerate(sequence))
        scored[sequence] = total / math.pow(len(PROMPT) + end - (EOS in sequence), penalty)
    return sorted(scored, key=scored.__getitem__, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -1.0])
def test_a_width_that_keeps_everything_is_an_exhaustive_search(penalty: float) -> None:
    """Oracle: every possible sequence, scored: the width holds all live beams, so the search misses none."""
    params = BeamSearchParams(beam_width=256, max_tokens=4, length_penalty=penalty)
    search = search_of(params)
    run(search, made_up)
    expected = everything(4, penalty)[:256]
    assert [tuple(beam.token_ids) for beam in search.best()] == expected


@pytest.mark.parametrize(("penalty", "num_rounds"), [(0.0, 2), (-1.0, 2), (1.0, 4), (3.0, 6)])
def test_it_ends_as_soon_as_nothing_can_change(penalty: float, num_rounds: int) -> None:
    """Oracle: the bound by hand; a search to the last round finds the same.

    The EOS has 0.6, token 2 has 0.3, token 3 has 0.1, so after two rounds the EOS of round 1 and [2, EOS] are complete
    with 0.6 and 0.18, and the best live beam has 0.09.  With penalty 1 the second is log(0.18) / 4 = -0.43, while live
    beams may still get log(0.09) / 9 = -0.27, after round 3 log(0.027) / 9 = -0.40, after round 4 -0.54.
    """

    def model(tokens: Sequence[int]) -> dict[int, float]:
        return {EOS: math.log(0.6), 2: math.log(0.3), 3: math.log(0.1)}

    params = BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=penalty)
    search, patient = search_of(params), search_of(params)
    patient._is_decided = lambda: False  # type: ignore[method-assign]
    assert run(patient, model) == 6
    assert run(search, model) == num_rounds
    assert search.best() == patient.best()


def test_requests_are_the_beams_with_the_prompt_before_them() -> None:
    """Oracle: arithmetic: 2 * width candidates, a separate id each, one token each, at most the context's tokens."""
    search = search_of(BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True), max_model_len=8)
    seen = set()
    lengths = []
    while not search.done:
        requests = search.next_requests()
        assert len(requests) == search.num_live
        for request in requests:
            assert request.prompt_token_ids[:3] == PROMPT
            assert (request.params.max_tokens, request.params.logprobs) == (1, 6)
            seen.add(request.request_id)
        lengths.append((len(requests), len(requests[0].prompt_token_ids)))
        search.advance([output_of(request, made_up) for request in requests])
    assert lengths == [(1, 3), (3, 4), (3, 5), (3, 6), (3, 7)]
    assert len(seen) == 13
    assert [len(beam.token_ids) for beam in search.best()] == [5, 5, 5]


def test_a_search_that_has_begun_goes_before_those_that_wait() -> None:
    """Oracle: a lower priority number runs first; otherwise each round would wait behind newer requests."""
    search = search_of(BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    priorities = []
    while not search.done:
        requests = search.next_requests()
        priorities.append({request.priority for request in requests})
        search.advance([output_of(request, made_up) for request in requests])
    assert priorities == [{0}, {-1}, {-1}]


def test_all_rounds_but_the_last_are_continued() -> None:
    """Oracle: the meaning of ``will_continue``: another request will continue from this request's last block."""
    search = search_of(BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    flags = []
    while not search.done:
        requests = search.next_requests()
        flags.append({request.will_continue for request in requests})
        search.advance([output_of(request, made_up) for request in requests])
    assert flags == [{True}, {True}, {False}]


def test_an_aborted_request_ends_the_search_with_what_there_is() -> None:
    """Oracle: the finish reason of any aborted request."""
    search = search_of(BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
    search.advance([output_of(request, made_up) for request in search.next_requests()])
    first, second = search.next_requests()
    search.advance([output_of(first, made_up), output_of(second, lambda tokens: {0: 0.0})])
    requests = search.next_requests()
    outputs = [output_of(request, made_up) for request in requests]
    outputs[1].outputs[0] = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort", logprobs=[])
    search.advance(outputs)
    assert search.done
    search.n = 2
    output = request_output(search, None)
    assert [one.finish_reason for one in output.outputs] == ["abort", "abort"]
    assert [len(one.token_ids) for one in output.outputs] == [2, 2]


def test_all_candidates_are_an_eos() -> None:
    """Oracle: no beam is live, so the search ends with the one sequence there is."""
    search = search_of(BeamSearchParams(beam_width=4, max_tokens=9))
    assert run(search, lambda tokens: {EOS: 0.0}) == 1
    output = beam_search_output(search, None)
    assert [(one.tokens, one.finish_reason) for one in output.sequences] == [([*PROMPT, EOS], "stop")]


def test_answers_keep_the_asked_number_of_logprobs() -> None:
    """Oracle: the ranks of each position: the token itself, and the requested number of likeliest tokens."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    for count in (0, 1, 3):
        request = EngineRequest(
            request_id="search", prompt_token_ids=PROMPT, params=one_token(params, logprobs=count), eos_token_ids=(EOS,)
        )
        search = BeamSearch(request, params, MODEL_INFO, n=2)
        run(search, made_up)
        for one in request_output(search, None).outputs:
            assert one.logprobs is not None and len(one.logprobs) == 3
            for token, position in zip(one.token_ids, one.logprobs, strict=True):
                assert next(iter(position)) == token
                assert {entry.rank for entry in position.values()} >= set(range(1, count + 1))
                assert len(position) <= count + 1


def test_a_round_takes_as_many_searches_as_the_cache_holds() -> None:
    """Oracle: blocks counted by hand: a search of 40 tokens has 3 blocks, and 2 more per beam once it has beams."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    info = msgspec.structs.replace(MODEL_INFO, block_size=16, num_blocks=9)
    prompts = [[number] * 40 for number in range(4)]
    searches = [search_of(params, prompt=prompt, num_blocks=9) for prompt in prompts]
    rounds = []

    def generate(requests: list[EngineRequest]) -> list[RequestOutput]:
        rounds.append([request.prompt_token_ids[0] for request in requests])
        return [output_of(request, made_up) for request in requests]

    run_searches(searches, generate, info, max_searches=4, use_tqdm=False)
    assert rounds == [[0, 1], [0, 0], [0, 0], [1, 1], [1, 1], [2, 3], [2, 2], [2, 2], [3, 3], [3, 3]]
    alone = [search_of(params, prompt=prompt) for prompt in prompts]
    for search in alone:
        run(search, made_up)
    assert [search.best() for search in searches] == [search.best() for search in alone]


async def connected_run(llm_work: Callable[[AsyncLLM], object], engine: FakeEngine) -> None:
    with fake_service(engine) as service:
        llm = await AsyncLLM.connect(service.address, tokenizer=byte_level_tokenizer(), timeout_s=DEADLINE_S)
        try:
            await asyncio.wait_for(llm_work(llm), DEADLINE_S)  # type: ignore[arg-type]
        finally:
            await llm.close()


def test_async_beam_search() -> None:
    """Oracle: the fake model by hand: the next number is likeliest; the one after it has half the log-probability."""

    async def work(llm: AsyncLLM) -> None:
        params = BeamSearchParams(beam_width=3, max_tokens=2, ignore_eos=True)
        output, other = await asyncio.gather(llm.beam_search([5, 40], params), llm.beam_search([5, 70], params))
        assert [one.tokens for one in output.sequences] == [[5, 40, 41, 42], [5, 40, 41, 43], [5, 40, 42, 43]]
        assert [one.cum_logprob for one in output.sequences] == [-1.0, -1.5, -1.5]
        assert other.sequences[0].tokens == [5, 70, 71, 72]
        assert output.sequences[0].text == byte_level_tokenizer().decode([5, 40, 41, 42])
        assert llm.num_unfinished == 0

    asyncio.run(connected_run(work, FakeEngine(arith)))


def test_cancelling_a_search_leaves_nothing_in_the_engine() -> None:
    """Oracle: the engine's own record; another request is undisturbed."""
    engine = FakeEngine(arith, step_delay_s=0.002, max_running=2)

    async def work(llm: AsyncLLM) -> None:
        params = BeamSearchParams(beam_width=8, max_tokens=400, ignore_eos=True)
        searching = asyncio.create_task(llm.beam_search([5], params))
        while engine.num_steps < 20:
            await asyncio.sleep(0.002)
        searching.cancel()
        await asyncio.gather(searching, return_exceptions=True)
        assert llm.num_unfinished == 0
        while engine.has_unfinished:
            await asyncio.sleep(0.002)
        assert (await llm.beam_search([5], BeamSearchParams(beam_width=1, max_tokens=1))).sequences[0].tokens == [5, 6]

    asyncio.run(connected_run(work, engine))


def test_the_engines_death_ends_a_search() -> None:
    """Oracle: the engine's exception."""

    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError, match="told to fail"):
            await llm.beam_search([5], BeamSearchParams(beam_width=4, max_tokens=400, ignore_eos=True))

    asyncio.run(connected_run(work, FakeEngine(arith, fail_at_step=9)))
