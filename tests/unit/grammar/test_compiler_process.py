"""Grammars that crash, hang or eat memory end a process that is there for it, and are refused by name."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from typing import Any

import pytest

from tp_engine.errors import CODE_UNAVAILABLE, RequestError
from tp_engine.grammar.compiler import MAX_MEMORY_BYTES, MAX_SLOW, QUICK_S, GrammarCompiler
from tp_engine.grammar.compiler_process import CompilerProcess, TookTooLongError, TriedGrammar
from tp_engine.grammar.library import SpecialTokens, grammar_text
from tp_engine.grammar.matcher import GrammarMatcher
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.system.units import MIB

DEADLINE_S = 150.0
GOOD = StructuredOutputsParams(json={"type": "integer"})
SPECIAL = SpecialTokens(num_tokens=400, tokens=((7, "<|end|>"), (399, "<|call|>")))


def deep_schema(levels: int) -> dict[str, Any]:
    """Objects in objects, each by a reference to the next."""
    parts = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {}}}


def endless_schema(patterns: int = 50) -> dict[str, Any]:
    """A text that has to match many patterns at once, whose intersection takes time and memory without end."""
    return {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(patterns)]}


def long_rules(count: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "a"\n'


@pytest.fixture(scope="module")
def process() -> Iterator[CompilerProcess]:
    made = CompilerProcess(SPECIAL)
    made.try_out(GOOD, cpu_s=5.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json": deep_schema(3000)}, "the JSON schema cannot be used: it is nested too deeply"),
        ({"grammar": long_rules(30_000)}, "the grammar cannot be used: it is nested too deeply"),
        ({"regex": "("}, "the regex cannot be used: .*unclosed group"),
        ({"grammar": 'start: "a" <|no|>'}, "unknown special token"),
        ({"json": {"$ref": "#"}}, "no output fits it"),
        ({"choice": ["ab" * 120_000 + str(one) for one in range(4)]}, "the choice cannot be used: finding the tokens"),
    ],
)
def test_what_can_not_be_compiled_is_refused(process: CompilerProcess, params: dict[str, Any], words: str) -> None:
    """Oracle: the reason; the process serves the next grammar."""
    with pytest.raises(RequestError, match=words) as caught:
        process.try_out(StructuredOutputsParams(**params), cpu_s=5.0)
    assert caught.value.param == "structured_outputs"
    process.try_out(GOOD, cpu_s=5.0)


def test_time_and_memory_are_limited(process: CompilerProcess) -> None:
    """Oracle: the limit in the error; with time enough the memory runs out."""
    endless = StructuredOutputsParams(json=endless_schema())
    with pytest.raises(TookTooLongError, match=r"takes more than 0\.1 s to compile"):
        process.try_out(endless, cpu_s=0.1)
    with pytest.raises(RequestError, match="needs more than 256 MiB") as caught:
        process.try_out(endless, cpu_s=60.0)
    assert not isinstance(caught.value, TookTooLongError)
    process.try_out(GOOD, cpu_s=5.0)


def test_special_tokens_are_known(process: CompilerProcess) -> None:
    """Oracle: grammars by hand, which name tokens by text and by number; without the tokens they are only parsed."""
    for grammar in ('start: "a" <|call|> "b"', 'start: <[399]> | <[7]> "c"'):
        process.try_out(StructuredOutputsParams(grammar=grammar), cpu_s=5.0)
    unaware = CompilerProcess(None)
    unaware.try_out(StructuredOutputsParams(grammar="start: <|anything|>"), cpu_s=5.0)
    unaware.try_out(GOOD, cpu_s=5.0)
    with pytest.raises(RequestError, match="cannot be used"):
        unaware.try_out(StructuredOutputsParams(grammar="start: <|anything|> nothing"), cpu_s=5.0)
    unaware.close()


class FakeTrial:
    """Grammars that begin with "slow" take more than the quick queues give; the slow one holds them until ``go``.

    Those that begin with "big" take half of all memory.
    """

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> TriedGrammar:
        text = grammar_text(params)
        if not str(params.regex).startswith("slow"):
            return TriedGrammar(text, MAX_MEMORY_BYTES // 2 if str(params.regex).startswith("big") else 0)
        if cpu_s <= QUICK_S:
            raise TookTooLongError("later")
        assert self._go.wait(DEADLINE_S)
        return TriedGrammar(text, 0)

    def close(self) -> None:
        self._go.set()


def test_slow_grammars_hold_up_only_each_other() -> None:
    """Oracle: a quick grammar is compiled while many slow ones wait; too many are refused for now; one that nobody
    waits for any more is not compiled."""
    go = threading.Event()
    compiler = GrammarCompiler(byte_vocabulary(), new_trial=lambda _special_tokens: FakeTrial(go))
    grammars = [StructuredOutputsParams(regex=f"slow{number}") for number in range(MAX_SLOW + 1)]
    slow = {compiler.submit(params): params for params in grammars}
    assert compiler.submit(GOOD).result(DEADLINE_S) is compiler.known(GOOD)
    refused = next(as_completed(slow, DEADLINE_S))  # the last or, as the first queue has two threads, the one before it
    with pytest.raises(RequestError, match="try again later") as caught:
        refused.result()
    assert caught.value.code == CODE_UNAVAILABLE
    assert compiler.known(slow.pop(refused)) is None
    dropped, params = slow.popitem()
    assert dropped.cancel()
    go.set()
    assert all(one.result(DEADLINE_S) for one in slow)
    assert compiler.known(params) is None
    compiler.close()


def test_memory_of_all_grammars_is_limited() -> None:
    """Oracle: by hand: two fit; a third one takes the place of one that no output follows any more, or is refused for
    now, and passes later."""
    compiler = GrammarCompiler(byte_vocabulary(), new_trial=lambda _special_tokens: FakeTrial(threading.Event()))

    def started(number: int) -> GrammarMatcher:
        return compiler.submit(StructuredOutputsParams(regex=f"big{number}")).result(DEADLINE_S).start()

    first, second = started(1), started(2)
    with pytest.raises(RequestError, match="grammars of running requests take 512 MiB") as caught:
        started(3)
    assert caught.value.code == CODE_UNAVAILABLE
    assert compiler.submit(GOOD).result(DEADLINE_S)
    del first
    deadline = time.monotonic() + DEADLINE_S
    third = None
    while third is None:  # the thread that compiled the first may still hold it for a moment
        assert time.monotonic() < deadline
        with contextlib.suppress(RequestError):
            third = started(3)
    assert second.accept(ord("b")) and third.accept(ord("b"))
    compiler.close()


def test_what_a_grammar_takes_is_measured(process: CompilerProcess) -> None:
    """Oracle: a long text takes some hundred bytes for each character, an ordinary schema less than a megabyte."""
    long_text = StructuredOutputsParams(grammar=f'start: "{"a" * 100_000}"')
    assert 10 * MIB < process.try_out(long_text, cpu_s=5.0).num_bytes < 100 * MIB
    assert process.try_out(GOOD, cpu_s=5.0).num_bytes < MIB


def test_refused_grammars_are_remembered() -> None:
    """Oracle: the same words at once, with the real process; a good grammar is compiled for the vocabulary."""
    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=0.2)
    bad = StructuredOutputsParams(json=json.dumps(endless_schema()))
    with pytest.raises(RequestError, match=r"takes more than 0\.2 s"):
        compiler.submit(bad).result(DEADLINE_S)
    with pytest.raises(RequestError, match=r"takes more than 0\.2 s") as again:
        compiler.known(bad)
    assert again.value.code == "invalid_grammar"
    assert compiler.submit(GOOD).result(DEADLINE_S) is compiler.known(GOOD)
    compiler.close()
