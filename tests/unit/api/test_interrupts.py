"""Exceptions from outside that strike a call of ``LLM`` anywhere: Ctrl-C, alarms, timeouts of tests and of libraries.

A signal's handler, or another thread, raises between two instructions of the thread that it strikes.  So does a trace
function before a line of Python, also of the libraries', and it does so at the same line each time.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.e2e.frontend import new_engine
from tests.patience import on_this_machine
from tests.services import FakeLLM, FakeService, services
from tests.unit.api.test_llm_calls import SHORT, idle, texts
from tp_engine import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "ab"}]


class TimeIsOver(BaseException):
    """As that of pytest-timeout: no ``Exception``."""


class LateError(Exception):
    """As a handler of alarms raises it."""


KINDS: list[type[BaseException]] = [TimeIsOver, LateError, KeyboardInterrupt, SystemExit]


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
    """The number of lines of ``work``, which ``error`` strikes before that of this number, if it has one."""
    strike, before = Strike(error, number), sys.gettrace()
    try:
        sys.settrace(strike)
        work()
    finally:
        sys.settrace(before)
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
        with pytest.raises(KINDS[round_ % len(KINDS)], match="struck"):
            struck(work, KINDS[round_ % len(KINDS)], number)
        if name == "pause":
            llm.resume()
        assert texts(llm.generate(["ab"], SHORT, use_tqdm=False)) == ["ab"], number
        assert idle(llm)


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
        with pytest.raises(KINDS[round_ % len(KINDS)], match="struck"):
            start(KINDS[round_ % len(KINDS)], rng.randrange(1, total))
        gc.collect()
        deadline_s = time.monotonic() + on_this_machine(20)
        while threading.active_count() > before:
            assert time.monotonic() < deadline_s, threading.enumerate()
            time.sleep(0.002)
