"""Exceptions from outside that strike a call of ``LLM`` anywhere: Ctrl-C, alarms, timeouts of tests and of libraries.

A signal's handler, or another thread, raises between two instructions of the thread that it strikes.  So does a trace
function before a line of Python, also of the libraries', and it does so at the same line each time.
"""

from __future__ import annotations

import ast
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tp_engine
from tests.e2e.frontend import new_engine
from tests.patience import on_this_machine
from tests.services import FakeLLM, FakeService, services
from tests.unit.api.test_llm_calls import SHORT, idle, texts
from tp_engine import LLM, BeamSearchParams, SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "ab"}]


class TimeIsOver(BaseException):
    """As that of pytest-timeout: no ``Exception``."""


class LateError(Exception):
    """As a handler of alarms raises it."""


KINDS: list[type[BaseException]] = [TimeIsOver, LateError, KeyboardInterrupt, SystemExit, TimeoutError]


def pause(llm: FakeLLM) -> None:
    llm.pause()
    llm.resume()


CALLS: dict[str, Callable[[FakeLLM], Any]] = {
    "generate": lambda llm: llm.generate(["abc", "de"] * 3, PARAMS, use_tqdm=False),
    "stream": lambda llm: list(llm.generate(iter(["abc"] * 4), PARAMS, use_tqdm=False, stream=True)),
    "chat": lambda llm: llm.chat([CHAT] * 2, PARAMS, use_tqdm=False),
    "pause": pause,
}


class Strike:
    """Raises ``error`` in this thread before its ``number``-th line, and counts them."""

    def __init__(self, error: type[BaseException], number: int) -> None:
        self.count, self._error, self._number = 0, error, number

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> Strike:
        if event == "line":
            self.count += 1
            if self.count == self._number:
                sys.settrace(None)
                raise self._error("struck")
        return self


def struck(work: Callable[[], Any], error: type[BaseException], number: int) -> int:
    """The number of lines of ``work`` that ran; ``error`` strikes before that of this number, if there is one, which
    depends on how often a wait has to look again.  Oracle: the very exception is raised."""
    strike, before, caught = Strike(error, number), sys.gettrace(), ""
    try:
        sys.settrace(strike)
        work()
    except error as raised:
        caught = str(raised)
    finally:
        sys.settrace(before)
    assert (caught == "struck") == (strike.count == number), (number, caught)
    return strike.count


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    with FakeLLM(new_engine()) as made:
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_struck_anywhere_harms_no_other(llm: FakeLLM, name: str) -> None:
    """Oracle: the very exception reaches the caller; then nothing runs, and the next answer is right."""
    rng = random.Random(name)

    def work() -> None:
        CALLS[name](llm)

    work()
    total = struck(work, TimeIsOver, -1)
    for round_ in range(20):
        number = rng.randrange(1, total)
        struck(work, KINDS[round_ % len(KINDS)], number)
        if name == "pause":
            llm.resume()
        assert texts(llm.generate(["ab"], SHORT, use_tqdm=False)) == ["ab"], number
        assert idle(llm)


def test_nothing_that_catches_errors_runs_in_the_thread_that_waits() -> None:
    """Oracle: the functions that this thread enters, as their source has them: none drops an error of which one that
    strikes might be (a TimeoutError is an OSError)."""
    entered: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        with FakeLLM(new_engine()) as llm:
            for call in CALLS.values():
                call(llm)
            llm.generate(["a"], {"max_tokens": 1, "structured_outputs": {"regex": "a+"}}, use_tqdm=False)
            llm.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=2))
            llm.update_weights([("a", torch.ones(2))])
    finally:
        sys.setprofile(None)
    found = [(path, line) for path, line in entered if dropped_errors(path, line)]
    assert len(entered) > 100 and not found, found


PACKAGE = str(Path(tp_engine.__file__).parent)  # a checkout may have this name too, with an environment in it
BROAD = {"Exception", "BaseException", "OSError", "TimeoutError", "EnvironmentError", "IOError"}


@cache
def functions_of(path: str) -> dict[int, ast.AST]:
    """The functions of a file, by their first lines, decorators included."""
    found: dict[int, ast.AST] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[min([node.lineno, *(one.lineno for one in node.decorator_list)])] = node
    return found


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions in it, which other threads may call."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from own_nodes(node)


def dropped_errors(path: str, line: int) -> bool:
    """Whether the function at this line has a handler for errors of all kinds that raises none again."""
    for node in own_nodes(functions_of(path).get(line, ast.Pass())):
        if isinstance(node, ast.ExceptHandler):
            names, raises = node.type, any(isinstance(one, ast.Raise) for one in ast.walk(node))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "suppress":
            names, raises = ast.Tuple(elts=node.args), False
        else:
            continue
        if not raises and (names is None or BROAD & {getattr(one, "id", "") for one in ast.walk(names)}):
            return True
    return False


def test_a_start_that_is_struck_anywhere_leaves_nothing() -> None:
    """Oracle: the threads from before; the suite's fixtures look for processes, files and memory."""
    rng, before = random.Random(1), threading.active_count()

    def start(error: type[BaseException], number: int) -> int:
        service = FakeService(new_engine())
        try:
            with services(lambda config: service):
                return struck(lambda: LLM(device="cpu").close(), error, number)
        finally:
            service.kill()
            service.close()

    start(TimeIsOver, -1)
    total = start(TimeIsOver, -1)
    for round_ in range(12):
        start(KINDS[round_ % len(KINDS)], rng.randrange(1, total))
        gc.collect()
        deadline_s = time.monotonic() + on_this_machine(20)
        while threading.active_count() > before:
            assert time.monotonic() < deadline_s, threading.enumerate()
            time.sleep(0.002)
