"""Requests that wait for their grammars, with a compiler whose speed the test sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.sched.scheduler_harness import limits
from tp_engine.errors import INVALID_GRAMMAR, EngineDeadError, RequestError
from tp_engine.features.structured_output.feature import MASK_ROWS
from tp_engine.features.structured_output.queue import GrammarQueue
from tp_engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from tp_engine.grammar.compiler_process import TriedGrammar
from tp_engine.grammar.library import grammar_text
from tp_engine.grammar.matcher import GrammarMatcher
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.plan import IntArray, StepResult
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.sched.scheduler import Scheduler

DEADLINE_S = 100.0
VOCAB = 384


class NoTrial:
    """Lets every grammar pass."""

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> TriedGrammar:
        return TriedGrammar(grammar_text(params), 0)

    def close(self) -> None:
        pass


class SlowCompiler(GrammarCompiler):
    """Compiles an expression when the test sets its ``go``; one that begins with "broken" fails like a bug."""

    def __init__(self) -> None:
        vocabulary = make_vocabulary(byte_level_tokenizer().backend_tokenizer.to_str(), VOCAB, (1,))
        super().__init__(vocabulary, new_trial=lambda _special_tokens: NoTrial())
        self.go: dict[str, threading.Event] = {}

    def compile(self, params: StructuredOutputsParams, tried: TriedGrammar | None = None) -> CompiledGrammar:
        regex = str(params.regex)
        assert self.go[regex].wait(DEADLINE_S)
        if regex.startswith("broken"):
            raise ZeroDivisionError("a bug")
        return super().compile(params, tried)


@dataclass
class Bench:
    compiler: SlowCompiler = field(default_factory=SlowCompiler)

    def __post_init__(self) -> None:
        self.queue = GrammarQueue(self.compiler, VOCAB)
        self.scheduler = Scheduler(limits(), given={"structured_output": self.queue.masks})

    def add(self, request_id: str, regex: str) -> None:
        self.compiler.go.setdefault(regex, threading.Event())
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        self.queue.add(EngineRequest(request_id=request_id, prompt_token_ids=[5], params=params), self.scheduler)

    def abort(self, request_id: str) -> None:
        self.queue.forget([request_id])
        self.scheduler.abort([request_id])

    def finish(self, *regexes: str) -> list[Any]:
        """Let these compile, and settle every finished one."""
        for regex in regexes:
            self.compiler.go[regex].set()
        for future, _ in list(self.queue._waiting.values()):
            future.exception(DEADLINE_S)
        self.queue.wait(DEADLINE_S)
        return self.queue.settle(self.scheduler)

    def tokens(self, text: str) -> IntArray:
        return np.array(byte_level_tokenizer().encode(text, add_special_tokens=False), dtype=np.int32)

    def num_masked_rows(self) -> int:
        """The rows of the next plan; all of them have masks."""
        plan = self.scheduler.schedule()
        return 0 if plan is None else len(MASK_ROWS.of(plan))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for event in made.compiler.go.values():
        event.set()
    made.queue.close()


def test_a_request_runs_when_its_grammar_is_there(bench: Bench) -> None:
    """Oracle: a known grammar needs no thread."""
    bench.add("first", "ab*")
    assert bench.queue.settle(bench.scheduler) == [] and bench.num_masked_rows() == 0
    assert bench.finish("ab*") == []
    bench.add("second", "ab*")
    assert bench.num_masked_rows() == 2


def test_a_failure_ends_its_request_alone(bench: Bench) -> None:
    """A grammar that the library refuses, and a bug. Oracle: one record each, with the reason and whose fault it is;
    the refused grammar is refused at once the next time."""
    bench.add("refused", "(")
    (delta,) = bench.finish("(")
    assert (delta.request_id, delta.finish_reason) == ("refused", FinishReason.ERROR) and "unclosed" in delta.error
    assert delta.error_code == INVALID_GRAMMAR
    bench.add("bug", "broken")
    (delta,) = bench.finish("broken")
    assert (delta.request_id, delta.error, delta.error_code) == ("bug", "a bug", None)
    with pytest.raises(RequestError, match="unclosed"):
        bench.add("again", "(")
    assert not bench.scheduler.has_unfinished


def test_the_grammar_of_an_aborted_request_is_not_for_the_next_of_its_name(bench: Bench) -> None:
    """Oracle: the second request waits for its own grammar, although the first one's is ready."""
    bench.add("same", "first")
    bench.abort("same")
    bench.add("same", "second")
    bench.compiler.go["first"].set()
    bench.queue.wait(DEADLINE_S)
    assert bench.queue.settle(bench.scheduler) == []
    assert bench.num_masked_rows() == 0 and bench.scheduler.has_unfinished
    assert bench.finish("second") == []
    assert bench.num_masked_rows() == 1


def test_a_mask_that_comes_wakes_the_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: the wait ends with the mask, before or after it began; with none in work it ends at once."""
    bench.add("waiting", "ab*")
    assert bench.finish("ab*") == []
    plan = bench.scheduler.schedule()
    assert plan is not None
    found, find = threading.Event(), GrammarMatcher.find_mask

    def hanging(matcher: GrammarMatcher) -> None:
        assert found.wait(DEADLINE_S)
        find(matcher)

    monkeypatch.setattr(GrammarMatcher, "find_mask", hanging)
    bench.scheduler.update(plan, StepResult(step_id=plan.step_id, token_ids=bench.tokens("a")))
    assert bench.num_masked_rows() == 0 and bench.scheduler.has_unfinished
    timer = threading.Timer(0.02, found.set)
    timer.start()
    began_s = time.monotonic()
    while not bench.num_masked_rows():
        bench.queue.wait(DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S / 2
    timer.join()
    bench.queue.wait(DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S / 2


def test_a_batch_waits_until_all_are_settled(bench: Bench) -> None:
    """Oracle: when it returns the scheduler has the request with a grammar, and the broken one's end is returned; what
    ``check`` raises meanwhile ends the wait."""
    bench.add("good", "a+")
    bench.add("bad", "broken")

    def fail() -> None:
        raise EngineDeadError("a rank died")

    with pytest.raises(EngineDeadError, match="a rank died"):
        bench.queue.settle_all(bench.scheduler, fail)
    assert bench.num_masked_rows() == 0

    def go_on() -> None:
        for event in bench.compiler.go.values():
            event.set()

    ended = bench.queue.settle_all(bench.scheduler, go_on)
    assert [one.request_id for one in ended] == ["bad"]
    while not bench.num_masked_rows():
        bench.queue.wait(DEADLINE_S)


def test_without_a_compiler() -> None:
    """Oracle: the reason why there is no compiler; the scheduler does not know the request."""
    queue = GrammarQueue(RequestError("no tokenizer", param="structured_outputs"), VOCAB)
    scheduler = Scheduler(limits(), given={"structured_output": queue.masks})
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="no tokenizer"):
        queue.add(EngineRequest(request_id="r", prompt_token_ids=[5], params=params), scheduler)
    assert not scheduler.has_unfinished
