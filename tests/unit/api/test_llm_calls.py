"""Calls of ``LLM`` with a fake engine: rows, errors, deadlines, streams, and exceptions from outside."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import pickle
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from tests.e2e.frontend import INFO, new_engine
from tests.fake_engine import FakeEngine
from tests.patience import on_this_machine
from tests.services import FakeLLM
from tp_engine import RequestError, SamplingParams
from tp_engine.errors import NO_TOKEN_LEFT, EngineDeadError
from tp_engine.requests.request import FinishReason, SequenceDelta, StepOutput

ENDLESS = [258 - 10]  # a prompt of one token, which the engine repeats until max_tokens
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture
def engine() -> FakeEngine:
    return new_engine(0.001)


@pytest.fixture
def llm(engine: FakeEngine) -> Iterator[FakeLLM]:
    with FakeLLM(engine) as made:
        yield made
        assert idle(made)


def idle(llm: FakeLLM) -> bool:
    """Wait until nothing runs and nobody waits."""
    deadline_s = time.monotonic() + on_this_machine(20)
    while llm.engine.has_unfinished or len(llm.outputs) or llm.outputs.num_streams:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return True


def texts(outputs: Any) -> list[str]:
    return [output.outputs[0].text for output in outputs]


IDS = [97, 98, 99]


@pytest.mark.parametrize(
    "prompts",
    [
        [IDS, IDS],
        np.array([IDS, IDS]),
        torch.tensor([IDS, IDS]),
        [np.array(IDS), torch.tensor(IDS)],
        [[np.int64(one) for one in IDS], tuple(IDS)],
        [{"prompt_token_ids": np.array(IDS)}, {"prompt_token_ids": torch.tensor(IDS), "id": 7}],
        [{"prompt": "abc", "id": 1}, {"prompt": "abc", "multi_modal_data": None}],
        np.array(["abc", "abc"]),
        np.array(["abc", "abc"], dtype=object),
        deque(["abc", "abc"]),
        ("abc", "abc"),
        (one for one in ["abc", IDS]),
        map(str, ["abc", "abc"]),
        [range(97, 100), deque(IDS)],
        [iter(IDS), array("i", IDS)],
        {"first": "abc", "second": "abc"}.values(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_prompts_in_the_forms_of_other_libraries(llm: FakeLLM, prompts: Any) -> None:
    """Oracle: the engine repeats each prompt."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert texts(outputs) == ["abc", "abc"] and [output.row for output in outputs] == [0, 1]


def test_one_prompt_of_token_ids(llm: FakeLLM) -> None:
    """Oracle: a flat list, array or tensor of ids is one prompt, as a generator of ids."""
    numbers = [np.int64(one) for one in IDS]
    prompts: tuple[Any, ...] = (IDS, np.array(IDS), torch.tensor(IDS), numbers, iter(IDS), np.array("abc"))
    for prompt in prompts:
        assert texts(llm.generate(prompt, SamplingParams(max_tokens=9), use_tqdm=False)) == ["abc"]


def test_columns_may_be_generators_and_arrays(llm: FakeLLM) -> None:
    """Oracle: one value for each prompt, in order; too few are told."""
    params = [SamplingParams(max_tokens=one) for one in (1, 2)]
    columns: list[Any] = [iter(params), tuple(params), np.array(params, dtype=object), deque(params)]
    columns += [{"first": params[0], "second": params[1]}.values(), map(SamplingParams.clone, params)]
    for given in columns:
        assert texts(llm.generate(["abc"] * 2, given, use_tqdm=False)) == ["a", "ab"]
    assert texts(llm.generate(iter(["abc"] * 2), iter(params), False, None, np.array([1, 0]))) == ["a", "ab"]
    assert texts(llm.generate(["abc"] * 2, params, False, priority=range(2))) == ["a", "ab"]
    assert texts(llm.generate(iter(["abc"] * 2), itertools.cycle(params), use_tqdm=False)) == ["a", "ab"]
    with pytest.raises(RequestError, match=r"prompts\[1\]: there are 1 sampling_params for more prompts"):
        llm.generate(iter(["abc"] * 2), iter(params[:1]), use_tqdm=False)
    with pytest.raises(RequestError, match="more than 2 sampling_params for 2 prompts"):
        llm.generate(["abc"] * 2, itertools.cycle(params), use_tqdm=False)


def test_conversations_as_pandas_reads_them_of_parquet(llm: FakeLLM) -> None:
    """Oracle: the same conversations in lists."""
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    chats = [[{"role": "user", "content": content}] for content in ("abc", parts)]
    expected = texts(llm.chat(chats, SHORT, use_tqdm=False))
    arrays = np.empty(2, dtype=object)
    arrays[:] = [np.array(chats[0]), np.array([{"role": "user", "content": np.array(parts)}])]
    forms: list[Any] = [arrays, [iter(one) for one in chats], map(deque, chats)]
    for given in forms:
        assert texts(llm.chat(given, SHORT, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    ("call", "words", "param"),
    [
        (lambda llm: llm.generate(["a"] * 500 + [""]), "prompts[500]: the prompt is empty", "prompts[500]"),
        (lambda llm: llm.generate(["a", float("nan")]), "prompts[1]: the prompt is of type float", "prompts[1]"),
        (lambda llm: llm.generate(["a", None, "b"]), "prompts[1]: the prompt is of type NoneType", "prompts[1]"),
        (lambda llm: llm.generate(["a", "x" * 4000]), "prompts[1]: This model's maximum context", "prompts[1]"),
        (lambda llm: llm.generate(["a"] * 2, [None, {"temp": 1}]), "prompts[1]: SamplingParams: unknown", "prompts[1]"),
        (lambda llm: llm.generate(iter(["a", [5, -1]])), "prompts[1]: the prompt contains the token", "prompts[1]"),
        (lambda llm: llm.generate([[True, 5]] * 2), "prompts[0]: the prompt contains True", "prompts[0]"),
        (
            lambda llm: llm.chat([[{"role": "user", "content": "a"}]] * 50 + [[{"role": "user"}]]),
            "conversations[50]: messages[0] has no content",
            "conversations[50].messages",
        ),
        (lambda llm: llm.chat(iter([[{"role": "user"}]])), "conversations[0]: messages[0]", "conversations[0]."),
        (lambda llm: llm.generate(""), "the prompt is empty", "prompt"),
        (lambda llm: llm.generate(b"a"), "prompts is of type bytes", "prompts"),
        (lambda llm: llm.chat("a"), "messages is of type str", "messages"),
        (lambda llm: llm.generate(prompt_token_ids=[[1]]), "prompts=[ids, ids]", "prompt_token_ids"),
        (lambda llm: llm.generate("a", on_error="skip"), "on_error is 'skip'; it must be raise or return", "on_error"),
        (lambda llm: llm.generate("a", timeout_s=-1), "timeout_s is -1", "timeout_s"),
        (lambda llm: llm.generate({"prompt_embeds": 1}), "the prompt has 'prompt_embeds'", "prompt"),
        (lambda llm: llm.generate("a", tokenization_kwargs={"pading": 1}), "has 'pading'", "tokenization_kwargs"),
        (lambda llm: llm.generate("a", tokenization_kwargs={"max_length": 1}), "truncation=True", "tokenization_kw"),
    ],
)
def test_an_error_names_its_row(llm: FakeLLM, call: Callable[[Any], object], words: str, param: str) -> None:
    """Oracle: the words and the parameter of each; nothing has run unless it came from a generator."""
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert words in str(caught.value) and (caught.value.param or "").startswith(param)


def test_an_error_names_its_text_of_a_score() -> None:
    """Oracle: by hand: the one text that is empty."""
    info = msgspec.structs.replace(INFO, convert="embed", hidden_size=4, dimensions=())
    with FakeLLM(FakeEngine(model_info=info)) as llm, pytest.raises(RequestError, match=r"documents\[2\] is empty"):
        llm.score("q", iter(["a", "b", ""]))


def test_errors_may_stand_in_their_rows(llm: FakeLLM) -> None:
    """Oracle: the other rows' answers; a request that only the engine refuses; a list and a generator."""
    refuse, add = [120], llm.engine.add_request

    def add_request(request: Any) -> None:
        if request.prompt_token_ids == refuse:
            raise RequestError("it can never fit")
        add(request)

    llm.engine.add_request = add_request  # type: ignore[method-assign]
    prompts: list[Any] = ["ab", "", [120], "cd", 3.5]
    for given in (prompts, iter(prompts)):
        outputs: list[Any] = llm.generate(given, SHORT, use_tqdm=False, on_error="return")
        errors = {row: str(one) for row, one in enumerate(outputs) if isinstance(one, RequestError)}
        assert list(errors) == [1, 2, 4] and errors[2] == "prompts[2]: it can never fit"
        assert [outputs[row].outputs[0].text for row in (0, 3)] == ["ab", "cd"]
    with pytest.raises(RequestError, match=r"prompts\[1\]: it can never fit"):
        llm.generate([prompts[0], [120]], SHORT, use_tqdm=False)


@pytest.fixture
def refusing(llm: FakeLLM) -> FakeLLM:
    """An engine in which sequences that begin with x end without a token: their own fields leave none."""
    step = llm.engine.step

    def refuse() -> StepOutput:
        bad = [one for one in llm.engine._sequences if one.request.prompt_token_ids[0] == ord("x")]
        llm.engine._sequences = [one for one in llm.engine._sequences if one not in bad]
        output = step()
        output.deltas += [
            SequenceDelta(
                request_id=one.request.request_id,
                index=one.index,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                error="no token is left",
                error_code=NO_TOKEN_LEFT,
            )
            for one in bad
        ]
        return output

    llm.engine.step = refuse  # type: ignore[method-assign]
    return llm


BAD_LATE: list[Any] = ["ab", "x", "cd", "x", "e" * 40]


@pytest.mark.parametrize("given", [list, iter])
def test_a_row_that_gets_no_token_loses_no_other(refusing: FakeLLM, given: Callable[[Any], Any]) -> None:
    """Oracle: the other rows' answers, those too that end behind the bad ones; the error is the first bad row's."""
    params = SamplingParams(max_tokens=60)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: no token is left") as caught:
        refusing.generate(given(BAD_LATE), params, use_tqdm=False)
    error = caught.value
    assert (error.row, error.code) == (1, NO_TOKEN_LEFT)
    assert [(output.row, output.outputs[0].text) for output in error.outputs] == [(0, "ab"), (2, "cd"), (4, "e" * 40)]
    assert error.__notes__ == ["3 rows are done, and are the outputs of this error"]
    outputs: list[Any] = refusing.generate(given(BAD_LATE), params, use_tqdm=False, on_error="return")
    assert [one.row for one in outputs if isinstance(one, RequestError)] == [1, 3]
    with pytest.raises(RequestError, match=r"^no token is left") as caught:
        refusing.generate("x", params, use_tqdm=False)
    assert caught.value.outputs == ()


@pytest.mark.parametrize("bad", ["x", ""])
def test_a_stream_yields_what_runs_before_it_raises(refusing: FakeLLM, bad: str) -> None:
    """Oracle: rows that were sent before the bad one was found end, and are yielded; none is sent behind it."""
    prompts = (bad if number == 20 else "ab" for number in range(100_000))
    seen: set[int | None] = set()
    with pytest.raises(RequestError, match=r"^prompts\[20\]: "):
        for output in refusing.generate(prompts, SHORT, use_tqdm=False, stream=True):
            seen.add(output.row)
    assert set(range(20)) <= seen and len(seen) < 2000


def outputs_of(error: Any) -> list[tuple[int, list[int]]]:
    return [(output.row, output.outputs[0].token_ids) for output in error.outputs]


def test_an_interrupted_call_has_the_rows_that_are_done(llm: FakeLLM) -> None:
    """Oracle: the first row's answer; what strikes is raised where the caller's bar is told of the second one."""
    told = iter([None, LateError()])

    def update(_: int) -> None:
        if error := next(told):
            raise error

    bar = SimpleNamespace(update=update, set_postfix_str=lambda *_, **__: None, close=lambda: None)
    with pytest.raises(LateError) as caught:
        llm.generate([IDS, IDS, ENDLESS], [SHORT, SHORT, LONG], use_tqdm=lambda **_: bar)
    assert [ids for _, ids in outputs_of(caught.value)] == [IDS]


def test_a_call_whose_engine_dies_has_the_rows_that_are_done() -> None:
    """Oracle: the short row's answer, which came before the step that fails."""
    engine = new_engine(0.001)
    engine.fail_at_step = 30
    with FakeLLM(engine) as llm, pytest.raises(RuntimeError, match="told to fail") as caught:
        llm.generate([IDS, ENDLESS], [SHORT, LONG], use_tqdm=False)
    assert outputs_of(caught.value) == [(0, IDS)]


def test_any_number_of_rows_in_bounded_memory(llm: FakeLLM) -> None:
    """Oracle: the rows that have been made when one ends: a window; all outputs, in order or with their numbers."""
    most = 0
    prompts = (f"row {number}" for number in range(2000))
    seen: list[int] = []
    for output in llm.generate(prompts, SHORT, use_tqdm=False, stream=True):
        assert not isinstance(output, RequestError)
        assert output.row is not None
        seen.append(output.row)
        most = max(most, len(llm.outputs))
        assert output.prompt == f"row {output.row}"
    assert sorted(seen) == list(range(2000)) and most <= 256
    outputs = llm.generate((f"row {number}" for number in range(700)), SHORT, use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"row {number}" for number in range(700)]


def test_a_stream_that_is_left_early_leaves_nothing(llm: FakeLLM) -> None:
    """Oracle: the engine is idle, which the fixture looks at; what came before is kept."""
    stream = llm.generate(iter([IDS, *[ENDLESS] * 5]), [SHORT, *[LONG] * 5], use_tqdm=False, stream=True)
    assert next(stream).row == 0
    del stream


def test_a_call_ends_after_its_time(llm: FakeLLM) -> None:
    """Oracle: short rows are whole, and long ones have the beginning of their answer; the next call is served."""
    llm.generate(["a"], SHORT, use_tqdm=False)
    llm.engine.step_delay_s = 0.01
    outputs = llm.generate([IDS, ENDLESS], [SHORT, LONG], use_tqdm=False, timeout_s=0.5)
    assert outputs[1].outputs[0].finish_reason == "abort" and len(outputs[1].outputs[0].token_ids) < 900
    assert len(outputs[0].outputs[0].token_ids) in (0, 3)
    llm.engine.step_delay_s = 0.0
    assert texts(llm.generate(["ab"], SHORT, use_tqdm=False, timeout_s=math.inf)) == ["ab"]


class LateError(Exception):
    """The time is over."""


def raise_late(*_: object) -> None:
    raise LateError


@pytest.mark.parametrize("kind", ["alarm", "SIGUSR1 that exits", "Ctrl-C", "asynchronous"])
def test_whatever_strikes_a_call_ends_it_alone(llm: FakeLLM, kind: str) -> None:
    """Oracle: the exception reaches the caller at many moments; the next answer is right; nothing runs on."""
    here = threading.get_ident()

    def leave(*_: object) -> None:
        raise SystemExit(3)

    numbers = {"alarm": signal.SIGALRM, "SIGUSR1 that exits": signal.SIGUSR1, "Ctrl-C": signal.SIGINT}
    handlers: dict[str, Any] = {"alarm": raise_late, "SIGUSR1 that exits": leave, "Ctrl-C": signal.default_int_handler}
    number = numbers.get(kind)
    before = signal.signal(number, handlers[kind]) if number is not None else None

    def strike() -> None:
        if number is not None:
            os.kill(os.getpid(), number)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(LateError))

    try:
        for moment in range(6):
            timer = threading.Timer(0.002 + 0.01 * moment, strike)
            with pytest.raises((LateError, SystemExit, KeyboardInterrupt)):
                timer.start()
                while True:  # an asynchronous exception comes when the thread runs Python again
                    llm.generate([ENDLESS] * 8, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
            timer.join()
            assert texts(llm.generate(["ab"], SHORT, use_tqdm=False)) == ["ab"]
    finally:
        if number is not None:
            signal.signal(number, before)


def test_an_exception_of_another_thread_reaches_a_call_that_waits(llm: FakeLLM) -> None:
    """Oracle: the thread has ended, though the only row would end after 900 steps of half a second."""
    struck: list[type[BaseException]] = []

    def work() -> None:
        try:
            llm.generate([ENDLESS], LONG, use_tqdm=False)
        except LateError as error:
            struck.append(type(error))

    llm.engine.step_delay_s = 0.5
    thread = threading.Thread(target=work)
    thread.start()
    while not llm.engine.has_unfinished:
        time.sleep(0.002)
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(LateError))
    thread.join(on_this_machine(20))
    is_alive = thread.is_alive()
    llm.engine.step_delay_s = 0.0
    thread.join()
    assert struck == [LateError] and not is_alive


def test_threads_run_together(llm: FakeLLM) -> None:
    """Oracle: each thread's own answers; an endless call of one does not hold up the others."""
    with ThreadPoolExecutor(5) as pool:
        endless = pool.submit(llm.generate, [ENDLESS], LONG, use_tqdm=False)
        prompts = [f"thread {number}" for number in range(4)]
        params = SamplingParams(max_tokens=20)
        calls = [pool.submit(llm.generate, [one] * 5, params, use_tqdm=False) for one in prompts]
        assert [texts(call.result()) for call in calls] == [[one] * 5 for one in prompts]
        assert not endless.done()
        llm.pause("abort")
        assert endless.result()[0].outputs[0].finish_reason == "abort"
        llm.resume()


def test_a_paused_engine_refuses_calls(llm: FakeLLM) -> None:
    """Oracle: the remedy in the error."""
    llm.pause()
    with pytest.raises(RequestError, match=r"call resume\(\) first"):
        llm.generate(["a", "b"], SHORT, use_tqdm=False)
    llm.resume()
    assert texts(llm.generate(["a"], SHORT, use_tqdm=False)) == ["aaa"]


def test_progress_bars_of_the_caller(llm: FakeLLM) -> None:
    """Oracle: what vLLM calls: the factory with a total, then ``update`` to the end, and ``close``."""
    bars: list[Any] = []

    def make_bar(**options: Any) -> Any:
        bars.append(SimpleNamespace(options=options, count=0, closed=False))
        bar = bars[-1]
        bar.update = lambda by: setattr(bar, "count", bar.count + by)
        bar.set_postfix_str, bar.close = lambda *_, **__: None, lambda: setattr(bar, "closed", True)
        return bar

    llm.generate(["a"] * 7, SHORT, use_tqdm=make_bar)
    (bar,) = bars
    assert (bar.options["total"], bar.count, bar.closed) == (7, 7, True)
    yes: Any = 1  # as true as True
    assert texts(llm.generate("abc", SHORT, use_tqdm=yes)) == ["abc"]


def test_tokenization_is_obeyed(llm: FakeLLM) -> None:
    """Oracle: by hand: the first and the last tokens of a text."""
    params, patience_s = SamplingParams(max_tokens=9), cast(float, np.float32(60))
    for given, expected in (
        ({"truncation": True, "max_length": 2}, "ab"),
        ({"truncation": True, "max_length": 2, "truncation_side": "left"}, "cd"),
        ({"truncate_prompt_tokens": 3}, "bcd"),
        ({"add_special_tokens": False}, "abcd"),
        ({"truncation": np.bool_(True), "max_length": np.int64(2)}, "ab"),
    ):
        (output,) = llm.generate(["abcd"], params, use_tqdm=False, tokenization_kwargs=given, timeout_s=patience_s)
        assert output.outputs[0].text == expected
    (salted,) = llm.generate([{"prompt": "ab", "cache_salt": "x"}], SHORT, use_tqdm=False)
    assert llm.engine.added[-1].params.cache_salt == "x" and salted.outputs[0].text == "ab"


def test_an_llm_is_not_pickled(llm: FakeLLM) -> None:
    """Oracle: the words say what to do."""
    with pytest.raises(TypeError, match="create it where it is used"):
        pickle.dumps(llm)


def test_an_engine_that_fails_ends_calls_with_its_error() -> None:
    """Oracle: the call in flight gets the engine's own error, the next one an ``EngineDeadError``."""
    engine = new_engine(0.001)
    with FakeLLM(engine) as llm:
        engine.fail_at_step = 5
        with pytest.raises(RuntimeError, match="told to fail"):
            llm.generate([ENDLESS], LONG, use_tqdm=False)
        for use in (lambda: llm.generate("a"), llm.reset_prefix_cache, lambda: llm.weight_version):
            with pytest.raises(EngineDeadError, match="told to fail"):
                use()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


@pytest.mark.parametrize(
    ("name", "words"),
    [("llm_engine", "update_weights"), ("collective_rpc", "no code of yours"), ("apply_model", "no code of yours")],
)
def test_names_of_other_engines_say_what_does_it_here(llm: FakeLLM, name: str, words: str) -> None:
    """Oracle: an ``AttributeError``, so that ``hasattr`` is right, with the remedy; an unknown name has none."""
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{words}"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_at_all'$"):
        _ = llm.nothing_at_all  # type: ignore[attr-defined]
