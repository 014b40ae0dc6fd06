"""Compiles grammars for one model, in threads, after a trial in another process; remembers the last ones.

::

    submit --> first queue: tried out, compiled ----------------------------> the grammar, or why there is none
                    |                                                           ^
                    +--it takes too long--> next queue: the same from the start -+

Grammars that take long wait for each other in the last queue, and others do not wait for them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import numpy as np

from tp_engine.errors import CODE_UNAVAILABLE, INVALID_GRAMMAR, ConfigError, RequestError
from tp_engine.grammar.compiler_process import CompilerProcess, TookTooLongError, TriedGrammar
from tp_engine.grammar.library import SpecialTokens, new_matcher, refusal
from tp_engine.grammar.matcher import GrammarMatcher, GrammarPlace, Pace
from tp_engine.grammar.vocabulary import GrammarVocabulary, byte_vocabulary
from tp_engine.requests.structured_outputs import (
    COMPILATION_TIMEOUT_S,
    CONFIG_NAME,
    PARAM,
    StructuredOutputsDefaults,
    StructuredOutputsParams,
)
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.units import MIB

QUICK_S = 0.25
_FIRST_S = 0.05  # ordinary ones take some milliseconds
MAX_SLOW = 8
MAX_MEMORY_BYTES = 512 * MIB  # for all grammars that are remembered or in use
_MAX_REMEMBERED = 32
_NUM_QUICK_THREADS = 2
_SLOW_NICENESS = 10
_STACK_BYTES = 16 * MIB  # four times that of the process in which a grammar is tried out

Value = TypeVar("Value")


class CompiledGrammar:
    """A grammar before its first token, whose mask is ``first``; every sequence gets a copy."""

    def __init__(self, matcher: Any, first: bytes, vocabulary: GrammarVocabulary, pace: Pace | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.pace = pace or Pace()
        self._place = GrammarPlace()
        self._place.mask = np.frombuffer(first, dtype=np.int32)

    def start(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """A matcher before its first token; takes microseconds."""
        matcher = self._matcher.deep_copy()
        return GrammarMatcher(matcher, self._vocabulary, self.pace, ignore_eos=ignore_eos, place=self._place)


def compile_grammar(params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile in this thread.  Raises ``RequestError`` for unusable ``params``; hostile ones may end the process."""
    return CompiledGrammar(*new_matcher(params, vocabulary.tokens), vocabulary)


class GrammarCompiler:
    """Compiles for one vocabulary, for all threads; a grammar may take ``timeout_s`` of processor time."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        timeout_s: float = COMPILATION_TIMEOUT_S,
        new_trial: Callable[[SpecialTokens], Trial] = CompilerProcess,
    ) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled = _Recent[CompiledGrammar]()
        self._refused = _Recent[str]()
        self._paces = WeakSet[Pace]()

        self._trial = new_trial(vocabulary.special_tokens)

        def queue(name: str, cpu_s: float, **options: Any) -> _Queue:
            return _Queue(name, cpu_s, self._trial, **options)

        self._queues = (
            queue("first-grammars", min(_FIRST_S, timeout_s), num_threads=_NUM_QUICK_THREADS),
            queue("quick-grammars", min(QUICK_S, timeout_s)),
            queue("slow-grammars", timeout_s, niceness=_SLOW_NICENESS, max_jobs=MAX_SLOW),
        )

    def known(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """The grammar, if it is among the last ones; ``RequestError`` if it is among the last that were refused."""
        with self._lock:
            if (words := self._refused.get(params)) is not None:
                raise RequestError(words, param=PARAM, code=INVALID_GRAMMAR)
            found = self._compiled.get(params)
        if found is not None and found.pace.failure is not None:
            raise refusal(params, found.pace.failure)
        return found

    def submit(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """The grammar, tried out and compiled unless it is known.  The future may be cancelled until it is done.

        Its exception is a ``RequestError`` for unusable ``params``, with ``CODE_UNAVAILABLE`` if there are already too
        many that take long, or take memory.
        """
        found: Future[CompiledGrammar] = Future()
        cancellation = Cancellation()
        found.add_done_callback(lambda _: cancellation.cancel() if found.cancelled() else None)
        self._queues[0].submit(lambda: self._run(params, found, cancellation, 0))
        return found

    def compile(self, params: StructuredOutputsParams, tried: TriedGrammar | None = None) -> CompiledGrammar:
        """The grammar, compiled in this thread unless it is known; ``tried`` is the result of its trial."""
        grammar = self.known(params)
        if grammar is None:
            pace = self._reserved(0 if tried is None else tried.num_bytes)
            made = new_matcher(params, self.vocabulary.tokens, None if tried is None else tried.text)
            grammar = CompiledGrammar(*made, self.vocabulary, pace)
            with self._lock:
                self._compiled.put(params, grammar)
        return grammar

    def _reserved(self, num_bytes: int) -> Pace:
        """The pace of a new grammar, for whose memory older ones are forgotten; ``RequestError`` if there is none."""

        def used_bytes() -> int:
            return sum(pace.num_bytes for pace in self._paces)

        with self._lock:
            while used_bytes() + num_bytes > MAX_MEMORY_BYTES and self._compiled.forget_oldest():
                pass
            if (used := used_bytes()) + num_bytes > MAX_MEMORY_BYTES:
                words = f"the grammars of running requests take {used // MIB} MiB; try again later"
                raise RequestError(words, param=PARAM, code=CODE_UNAVAILABLE)
            self._paces.add(pace := Pace(num_bytes))
        return pace

    def close(self) -> None:
        """End the process, and the threads after their current grammars, without waiting for them."""
        for queue in self._queues:
            queue.close()
        self._trial.close()

    def _run(
        self,
        params: StructuredOutputsParams,
        found: Future[CompiledGrammar],
        cancellation: Cancellation,
        number: int,
    ) -> None:
        """Settle ``found`` in queue ``number``, or leave that to the next one."""
        if found.cancelled():
            return
        try:
            with cancelled_by(cancellation):
                tried = None if self.known(params) is not None else self._queues[number].try_out(params)
            grammar = self.compile(params, tried)
        except Exception as error:
            if isinstance(error, TookTooLongError) and number + 1 < len(self._queues):
                if self._queues[number + 1].submit(lambda: self._run(params, found, cancellation, number + 1)):
                    return
                words = f"{MAX_SLOW} grammars that take long are being compiled; try again later"
                error = RequestError(words, param=PARAM, code=CODE_UNAVAILABLE)
            elif isinstance(error, RequestError) and error.code != CODE_UNAVAILABLE:
                with self._lock:
                    self._refused.put(params, str(error))
            if found.set_running_or_notify_cancel():
                found.set_exception(error)
        else:
            if found.set_running_or_notify_cancel():
                found.set_result(grammar)


class Trial(Protocol):
    """``CompilerProcess``, or a stand-in."""

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> TriedGrammar: ...
    def close(self) -> None: ...


class _Queue:
    """Threads that try grammars out for ``cpu_s``; at most ``max_jobs`` run or wait."""

    def __init__(
        self,
        name: str,
        cpu_s: float,
        trial: Trial,
        *,
        num_threads: int = 1,
        niceness: int = 0,
        max_jobs: int | None = None,
    ) -> None:
        self._cpu_s = cpu_s
        self._trial = trial
        self._niceness = niceness
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, job: Callable[[], None]) -> bool:
        """Run ``job`` in one of the threads; False if there are too many."""
        with self._lock:
            if self._max_jobs is not None and self._num_jobs >= self._max_jobs:
                return False
            self._num_jobs += 1
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._threads.submit(self._run, job)
            finally:
                threading.stack_size(before)
        return True

    def try_out(self, params: StructuredOutputsParams) -> TriedGrammar:
        """Compile a grammar in the compiler's process, within the limits of this queue; jobs call it."""
        return self._trial.try_out(params, cpu_s=self._cpu_s, niceness=self._niceness)

    def close(self) -> None:
        """End the threads after their jobs, without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._num_jobs -= 1


class _Recent(Generic[Value]):
    """The last values by constraint."""

    def __init__(self) -> None:
        self._values: OrderedDict[StructuredOutputsParams, Value] = OrderedDict()

    def get(self, params: StructuredOutputsParams) -> Value | None:
        found = self._values.get(params)
        if found is not None:
            self._values.move_to_end(params)
        return found

    def put(self, params: StructuredOutputsParams, value: Value) -> None:
        self._values[params] = value
        if len(self._values) > _MAX_REMEMBERED:
            self._values.popitem(last=False)

    def forget_oldest(self) -> bool:
        """Forget one; False if there is none."""
        if self._values:
            self._values.popitem(last=False)
            return True
        return False


def check_defaults(defaults: StructuredOutputsDefaults) -> None:
    """Raise ``ConfigError`` if the library refuses the configured white space."""
    if defaults.whitespace_pattern is None:
        return
    try:
        compile_grammar(defaults.probe(), byte_vocabulary())
    except RequestError as error:
        raise ConfigError(f"{CONFIG_NAME} cannot be used: {error}") from error
