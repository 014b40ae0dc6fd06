"""Compiles grammars for one model, in threads, each after it has been tried out in another process; remembers the last.

::

    submit --> first queue: tried out, compiled -----------------------------> the grammar, or why there is none
                    |                                                            ^
                    +--more than its time--> next queue: the same from the start -+

Grammars that take long wait for each other in the last queue, and no others for them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from tp_engine.errors import CODE_UNAVAILABLE, INVALID_GRAMMAR, ConfigError, RequestError
from tp_engine.grammar.compiler_process import CompilerProcess, TookTooLongError
from tp_engine.grammar.library import SpecialTokens, new_matcher, refusal
from tp_engine.grammar.matcher import GrammarMatcher, Pace
from tp_engine.grammar.vocabulary import GrammarVocabulary, byte_vocabulary
from tp_engine.structured_outputs import (
    COMPILATION_TIMEOUT_S,
    CONFIG_NAME,
    PARAM,
    StructuredOutputsDefaults,
    StructuredOutputsParams,
)
from tp_engine.units import MIB

QUICK_S = 0.25
_FIRST_S = 0.05  # ordinary ones take some milliseconds
MAX_SLOW = 8
MAX_MEMORY_BYTES = 512 * MIB  # of all grammars that are remembered or in use
_MAX_REMEMBERED = 32
_SLOW_NICENESS = 10
_STACK_BYTES = 16 * MIB  # four times that of the process in which a grammar is tried out

Value = TypeVar("Value")


class CompiledGrammar:
    """A grammar before its first token; every sequence gets a copy."""

    def __init__(self, matcher: Any, vocabulary: GrammarVocabulary, pace: Pace | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.pace = pace or Pace()

    def start(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """Return a matcher before its first token; takes microseconds."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, self.pace, ignore_eos=ignore_eos)


def compile_grammar(params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile in this thread.  ``RequestError`` for unusable ``params``; hostile ones may end the process."""
    return CompiledGrammar(new_matcher(params, vocabulary.tokens), vocabulary)


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
        self._compiled: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()  # the last ones
        self._refused: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._paces = WeakSet[Pace]()

        first, other, quick, slow = (new_trial(vocabulary.special_tokens) for _ in range(4))
        self._queues = (
            _Queue("first-grammars", min(_FIRST_S, timeout_s), [first, other]),
            _Queue("quick-grammars", min(QUICK_S, timeout_s), [quick]),
            _Queue("slow-grammars", timeout_s, [slow], niceness=_SLOW_NICENESS, max_jobs=MAX_SLOW),
        )

    def known(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the grammar if it is among the last ones; ``RequestError`` if it is among the last that were
        refused."""
        with self._lock:
            if (words := self._refused.get(params)) is not None:
                _remember(self._refused, params, words)
                raise RequestError(words, param=PARAM, code=INVALID_GRAMMAR)
            if (found := self._compiled.get(params)) is not None:
                _remember(self._compiled, params, found)
        if found is not None and found.pace.failure is not None:
            raise refusal(params, found.pace.failure)
        return found

    def submit(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Return the grammar, tried out and compiled unless it is known.  The future may be cancelled until it is done.

        Its exception is a ``RequestError`` for unusable ``params``, with ``CODE_UNAVAILABLE`` if too many that take
        long, or too much memory, are there already.
        """
        found: Future[CompiledGrammar] = Future()
        self._queues[0].submit(lambda: self._run(params, found, 0))
        return found

    def compile(self, params: StructuredOutputsParams, num_bytes: int = 0) -> CompiledGrammar:
        """Return the grammar, compiled in this thread unless it is known; it may need ``num_bytes``."""
        grammar = self.known(params)
        if grammar is None:
            pace = self._reserved(num_bytes)
            grammar = CompiledGrammar(new_matcher(params, self.vocabulary.tokens), self.vocabulary, pace)
            with self._lock:
                _remember(self._compiled, params, grammar)
        return grammar

    def _reserved(self, num_bytes: int) -> Pace:
        """The pace of a new grammar; older ones are forgotten for its memory.  ``RequestError`` if there is none."""

        def used_bytes() -> int:
            return sum(pace.num_bytes for pace in self._paces)

        with self._lock:
            while used_bytes() + num_bytes > MAX_MEMORY_BYTES and self._compiled:
                self._compiled.popitem(last=False)
            if (used := used_bytes()) + num_bytes > MAX_MEMORY_BYTES:
                words = f"the grammars of running requests take {used // MIB} MiB; try again later"
                raise RequestError(words, param=PARAM, code=CODE_UNAVAILABLE)
            self._paces.add(pace := Pace(num_bytes))
        return pace

    def close(self) -> None:
        """End the processes, and the threads after their current grammars, without waiting for them."""
        for queue in self._queues:
            queue.close()

    def _run(self, params: StructuredOutputsParams, found: Future[CompiledGrammar], number: int) -> None:
        """Settle ``found`` in the queue of this ``number``, or leave that to the next one."""
        if found.cancelled():
            return
        try:
            num_bytes = 0 if self.known(params) is not None else self._queues[number].try_out(params)
            grammar = self.compile(params, num_bytes)
        except Exception as error:
            if isinstance(error, TookTooLongError) and number + 1 < len(self._queues):
                if self._queues[number + 1].submit(lambda: self._run(params, found, number + 1)):
                    return
                words = f"{MAX_SLOW} grammars that take long are being compiled; try again later"
                error = RequestError(words, param=PARAM, code=CODE_UNAVAILABLE)
            elif isinstance(error, RequestError) and error.code != CODE_UNAVAILABLE:
                with self._lock:
                    _remember(self._refused, params, str(error))
            if found.set_running_or_notify_cancel():
                found.set_exception(error)
        else:
            if found.set_running_or_notify_cancel():
                found.set_result(grammar)


class Trial(Protocol):
    """``CompilerProcess``, or a stand-in."""

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> int: ...
    def close(self) -> None: ...


class _Queue:
    """A thread for each of ``trials``, which tries grammars out for ``cpu_s``; at most ``max_jobs`` run or wait."""

    def __init__(
        self, name: str, cpu_s: float, trials: Sequence[Trial], *, niceness: int = 0, max_jobs: int | None = None
    ) -> None:
        self._cpu_s = cpu_s
        self._niceness = niceness
        self._free_jobs = None if max_jobs is None else threading.Semaphore(max_jobs)
        self._trials = trials
        self._idle: SimpleQueue[Trial] = SimpleQueue()
        for trial in trials:
            self._idle.put(trial)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(len(trials), thread_name_prefix=name)

    def submit(self, job: Callable[[], None]) -> bool:
        """Run ``job`` in one of the threads; False if there are too many."""
        free = self._free_jobs
        if free is not None and not free.acquire(blocking=False):
            return False
        with self._lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                done = self._threads.submit(job)
            finally:
                threading.stack_size(before)
        if free is not None:
            done.add_done_callback(lambda _: free.release())
        return True

    def try_out(self, params: StructuredOutputsParams) -> int:
        """Do as ``CompilerProcess``; for a job."""
        trial = self._idle.get()
        try:
            return trial.try_out(params, cpu_s=self._cpu_s, niceness=self._niceness)
        finally:
            self._idle.put(trial)

    def close(self) -> None:
        """End the trials, and the threads after their jobs, without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()


def _remember(
    values: OrderedDict[StructuredOutputsParams, Value], params: StructuredOutputsParams, value: Value
) -> None:
    values[params] = value
    values.move_to_end(params)
    if len(values) > _MAX_REMEMBERED:
        values.popitem(last=False)


def check_defaults(defaults: StructuredOutputsDefaults) -> None:
    """Raise ``ConfigError`` if the library refuses the white space of the engine's configuration."""
    if defaults.whitespace_pattern is None:
        return
    try:
        compile_grammar(defaults.probe(), byte_vocabulary())
    except RequestError as error:
        raise ConfigError(f"{CONFIG_NAME} can not be used: {error}") from error
