"""AsyncLLM against a fake engine in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.fake_engine import MODEL_INFO, FakeEngine, ServiceThread, arith, fake_pooled, fake_service, says
from tests.pooling_models import eos_tokenizer
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.async_llm import AsyncLLM
from tp_engine.errors import ConfigError, EngineDeadError, RequestError
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest, Pooling
from tp_engine.requests.sampling_params import RequestOutputKind, SamplingParams

DEADLINE_S = 100.0
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@asynccontextmanager
async def connected(service: ServiceThread) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.connect(service.address, tokenizer=byte_level_tokenizer(), timeout_s=DEADLINE_S)
    try:
        yield llm
    finally:
        await llm.close()


def run(
    scenario: Callable[[AsyncLLM, ServiceThread], Awaitable[None]], engine: FakeEngine | None = None
) -> ServiceThread:
    """Run a scenario against a served engine, within the deadline."""

    async def all_of_it() -> None:
        async with connected(service) as llm:
            await scenario(llm, service)

    async def limited() -> None:
        await asyncio.wait_for(all_of_it(), DEADLINE_S)

    with fake_service(engine) as service:
        asyncio.run(limited())
    return service


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def text_of(llm: AsyncLLM, prompt: str, params: SamplingParams | None = None) -> str:
    return "".join([update.text async for update in llm.stream(prompt, params or SamplingParams(max_tokens=None))])


def test_many_streams_at_once() -> None:
    """Oracle: the engine echoes each prompt; streams of 50 requests do not mix."""
    prompts = [f"the quick {i} 世界 😀 {'x' * (i % 7)}" for i in range(50)]

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        assert list(await asyncio.gather(*(text_of(llm, prompt) for prompt in prompts))) == prompts
        assert llm.num_unfinished == 0 and llm.is_ready and not llm.errored
        assert (await llm.engine.report()).stats.num_running == 0
        assert llm.model_info.max_model_len == 1024 and llm.tokenizer is byte_level_tokenizer()

    run(scenario)


def test_generate_yields_growing_outputs() -> None:
    """Oracle: each text is the beginning of the next; the last is the echo, finished, with the prompt's text."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        outputs = [output async for output in llm.generate("the quick fox", SamplingParams(max_tokens=None, n=2))]
        for one, other in pairwise(outputs):
            for before, after in zip(one.outputs, other.outputs, strict=True):
                assert after.text.startswith(before.text)
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert outputs[-1].finished and outputs[-1].prompt == "the quick fox"
        assert [completion.text for completion in outputs[-1].outputs] == ["the quick fox"] * 2

    run(scenario, FakeEngine(step_delay_s=0.002))


def test_long_texts_are_tokenized_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the refusal of a long text, whose encoding waits until the event loop has turned."""
    began, may_end = threading.Event(), threading.Event()

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        assert llm.tokenizer is not None
        encode = llm.tokenizer.encode

        def held(*arguments: Any, **options: Any) -> Any:
            began.set()
            assert may_end.wait(DEADLINE_S)
            return encode(*arguments, **options)

        monkeypatch.setattr(llm.tokenizer, "encode", held)
        with pytest.raises(RequestError, match="maximum context length is 1024"):
            asking = asyncio.create_task(text_of(llm, "the quick brown fox " * 300))
            await until(began.is_set)
            may_end.set()
            await asking

    run(scenario)


@pytest.mark.parametrize("how", ["break", "cancel", "aclose"])
def test_leaving_a_stream_aborts_the_request(how: str) -> None:
    """Oracle: the engine's record of aborts; nothing is left in flight."""
    engine = FakeEngine(arith, step_delay_s=0.002)

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        stream = llm.stream([5], LONG, request_id="left")

        async def read() -> None:
            async for _ in stream:
                if how == "break":
                    return

        if how == "aclose":
            await anext(stream)
        else:
            reading = asyncio.create_task(read())
            await until(lambda: engine.num_steps > 3)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        await until(lambda: engine.aborted == ["left"])
        assert llm.num_unfinished == 0
        assert await text_of(llm, "the", SamplingParams(max_tokens=2)) != ""

    run(scenario, engine)


def test_abort_by_name_ends_the_stream() -> None:
    """Oracle: the finish reason; an abort of an unknown request does nothing."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        await llm.abort("unknown")
        last = None
        async for update in llm.stream([5], LONG, request_id="mine"):
            if update.num_output_tokens == 3:
                await llm.abort("mine")
            last = update
        assert last is not None and last.finish_reason == "abort" and last.request_output is not None

    run(scenario, FakeEngine(arith, step_delay_s=0.002))


def test_a_stop_string_aborts_in_the_engine() -> None:
    """Oracle: the engine's record of aborts; without one it would generate 900 tokens more."""
    engine = FakeEngine(says(byte_level_tokenizer().encode("the fox. ") * 200), step_delay_s=0.001)

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        assert await text_of(llm, "x", SamplingParams(max_tokens=900, stop="fox. the")) == "the "
        await until(lambda: len(engine.aborted) == 1)

    run(scenario, engine)


@pytest.mark.parametrize("stop", [(), ("fox",)], ids=["left early", "ended by a stop string"])
def test_a_request_id_may_come_again_at_once(stop: tuple[str, ...]) -> None:
    """Oracle: the answer of a new id: nothing of the earlier request, which still runs, reaches the later one."""
    said = byte_level_tokenizer().encode("the fox. ") * 200
    params = SamplingParams(max_tokens=8)

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        for _ in range(5):
            async with aclosing(llm.stream("x", SamplingParams(max_tokens=900, stop=stop), "mine")) as updates:
                async for update in updates:
                    if update.num_output_tokens > 2 and not stop:
                        break
            last = [output async for output in llm.generate("x", params, "mine")][-1].outputs[0]
            assert (last.finish_reason, last.token_ids) == ("length", said[:8])

    run(scenario, FakeEngine(says(said), step_delay_s=0.001))


def test_errors_reach_their_own_stream_only() -> None:
    """Oracle: a bad prompt, an id in use and the engine's own refusal each raise at the caller."""

    class Full(FakeEngine):
        def add_request(self, request: EngineRequest) -> None:
            if len(request.prompt_token_ids) > 20:
                raise RequestError("no room for it", code="context_length_exceeded")
            super().add_request(request)

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        running = llm.stream([5], LONG, request_id="one")
        await anext(running)
        with pytest.raises(RequestError, match="the prompt is empty"):
            await text_of(llm, "")
        with pytest.raises(RequestError, match="'one' is in use"):
            await anext(llm.stream([5], LONG, request_id="one"))
        with pytest.raises(RequestError, match="no room for it") as caught:
            await anext(llm.stream([5] * 21, SamplingParams()))
        assert caught.value.code == "context_length_exceeded"
        assert (await anext(running)).finish_reason is None
        await running.aclose()

    run(scenario, Full(arith, step_delay_s=0.002))


def test_engine_death_fails_every_stream() -> None:
    """Oracle: the engine's exception, in each stream's own EngineDeadError and in later requests."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        results = await asyncio.gather(*(text_of(llm, "the", LONG) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert len({id(result) for result in results}) == 5 and "told to fail" in str(results[0])
        assert llm.errored and not llm.is_ready and llm.num_unfinished == 0
        with pytest.raises(EngineDeadError, match="told to fail"):
            await text_of(llm, "the")
        await asyncio.wait_for(llm.engine.wait_ended(), DEADLINE_S)

    service = run(scenario, FakeEngine(arith, fail_at_step=20))
    assert "told to fail" in str(service.error)


def test_serving_out() -> None:
    """Oracle: running requests finish, new ones are served too, and the end raises no error."""
    engine = FakeEngine(arith, step_delay_s=0.005)

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        running = asyncio.create_task(text_of(llm, "the", SamplingParams(max_tokens=40)))
        await until(lambda: engine.num_steps > 2)
        service.service.drain(DEADLINE_S)
        assert llm.is_ready
        assert await text_of(llm, "late") != ""
        assert await running != ""
        assert not llm.errored

    assert run(scenario, engine).error is None


def test_chat_prompt() -> None:
    """Oracle: the template's text, echoed."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        prompt = await llm.chat_prompt([{"role": "user", "content": "hi"}])
        params = SamplingParams(max_tokens=None, ignore_eos=True, skip_special_tokens=False)
        text = "".join([update.text async for update in llm.stream(prompt, params)])
        assert text == "<s>user: hi</s><s>assistant:</s>"

    run(scenario)


def test_a_slow_reader_loses_nothing() -> None:
    """Oracle: the engine's numbers, read long after they were made."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        slow = llm.stream([0], SamplingParams(max_tokens=300, ignore_eos=True))
        tokens = (await anext(slow)).token_ids
        await text_of(llm, "a" * 300, SamplingParams(max_tokens=300, ignore_eos=True))
        tokens += [token async for update in slow for token in update.token_ids]
        assert tokens == list(range(1, 301))

    run(scenario, FakeEngine(arith))


def test_connecting_to_nobody() -> None:
    """Oracle: the deadline, which the error names."""
    with pytest.raises(EngineDeadError, match=r"waited 0\.2 s"):
        asyncio.run(AsyncLLM.connect("unix:///tmp/tp_engine-nobody/engine", timeout_s=0.2))


def test_outputs_are_of_the_kind_that_is_asked_for() -> None:
    """Oracle: the engine echoes the prompt: all until then, what is new, or the end alone."""
    text = "the quick fox"

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        found: dict[RequestOutputKind, list[RequestOutput]] = {}
        for kind in RequestOutputKind:
            params = {"max_tokens": None, "output_kind": kind}
            found[kind] = [output async for output in llm.generate(text, sampling_params=params, request_id=kind.name)]
        assert [output.outputs[0].text for output in found[RequestOutputKind.FINAL_ONLY]] == [text]
        *earlier, last = found[RequestOutputKind.CUMULATIVE]
        assert last.outputs[0].text == text and len(earlier) > 1
        assert all(text.startswith(output.outputs[0].text) for output in earlier)
        deltas = found[RequestOutputKind.DELTA]
        assert "".join(output.outputs[0].text for output in deltas) == text and len(deltas) > 1
        assert [token_id for output in deltas for token_id in output.outputs[0].token_ids] == last.outputs[0].token_ids
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].request_id == "DELTA" and deltas[-1].prompt == text and deltas[-1].metrics is not None

    run(scenario)


def test_a_chat_is_a_generation_from_its_template() -> None:
    """Oracle: the engine echoes the prompt, which the template makes of the messages; so are the keywords of LLM."""

    async def scenario(llm: AsyncLLM, service: ServiceThread) -> None:
        template = "{% for m in messages %}{{ m.content }};{{ mood }}{% endfor %}"
        outputs = llm.chat(
            [{"role": "user", "content": "hello"}],
            {"max_tokens": None, "output_kind": RequestOutputKind.FINAL_ONLY},
            chat_template=template,
            chat_template_kwargs={"mood": "glad"},
        )
        assert [output.outputs[0].text async for output in outputs] == ["hello;glad"]
        assert await llm.get_tokenizer() is byte_level_tokenizer()

    run(scenario)


def test_embeddings_and_scores() -> None:
    """Oracle: the fake engine's states, cut and divided by their lengths, and the cosine of two of them."""
    info = msgspec.structs.replace(MODEL_INFO, convert="embed", hidden_size=4, dimensions=())

    def vector(text: str, size: int = 4) -> npt.NDArray[np.float64]:
        ids = eos_tokenizer().encode(text)
        request = EngineRequest(request_id="", prompt_token_ids=ids, params=SamplingParams(), pooling=Pooling())
        state = fake_pooled(request)[:size].astype(np.float64)
        return state / np.linalg.norm(state)

    async def scenario() -> None:
        async with await AsyncLLM.connect(service.address, tokenizer=eos_tokenizer(), timeout_s=DEADLINE_S) as llm:
            whole, cut = await asyncio.gather(llm.embed("hi"), llm.embed("hi", {"dimensions": 2}, request_id="mine"))
            assert whole.outputs.embedding == pytest.approx(vector("hi"), abs=1e-6)
            assert cut.outputs.embedding == pytest.approx(vector("hi", 2), abs=1e-6) and cut.request_id == "mine"
            scores = [one.outputs.score for one in await llm.score("hi", ["the quick", "hi"])]
            assert scores == pytest.approx([vector("hi") @ vector("the quick"), 1.0], abs=1e-6)
            # by no place on this host, which clients of a server would learn
            with pytest.raises(RequestError, match=r"^this model is served for embeddings and generates no text"):
                await anext(llm.generate("hi", SamplingParams()))

    with fake_service(FakeEngine(model_info=info)) as service:
        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_an_unknown_option_is_refused_before_anything_starts() -> None:
    """Oracle: the error has the option's name and the nearest right one."""
    with pytest.raises(ConfigError, match=r"unknown option blocksize.*block_size"):
        AsyncLLM(blocksize=16)  # type: ignore[call-arg]


def test_what_operators_ask_connects_by_itself(tmp_path: Path) -> None:
    """Oracle: by hand: prefixes are forgotten while nothing runs, and kept while something does."""

    async def scenario(llm: AsyncLLM) -> None:
        assert await llm.reset_prefix_cache()
        first = asyncio.ensure_future(anext(llm.generate([5, 6], LONG)))
        await until(lambda: bool(engine.added))
        assert not await llm.reset_prefix_cache()
        await first
        await llm.close()

    info = msgspec.structs.replace(MODEL_INFO, tokenizer=str(tmp_path))
    engine = FakeEngine(arith, step_delay_s=0.05, model_info=info)  # 900 tokens: it runs for long
    with fake_service(engine) as service:
        asyncio.run(asyncio.wait_for(scenario(AsyncLLM(address=service.address)), DEADLINE_S))
