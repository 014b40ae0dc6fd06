"""Requests that wait for their grammars, or for what their words and lists need, while the engine's loop runs.

::

    add ----> known: constrained at once
      |
      +-----> threads work ---------> done ----> settle(), between two steps: the request may run, or ends with an error
      |
      +-----> refused at once: no library, no tokenizer that it knows, a grammar that was refused lately
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tp_engine.engine.tokenizer import load_tokenizer_json
from tp_engine.errors import INVALID_GRAMMAR, NO_TOKEN_LEFT, RequestError
from tp_engine.features.structured_output.constraint import Grammar, MaskWriter, TokenRules, restricting_fields
from tp_engine.features.structured_output.feature import banned_words
from tp_engine.features.structured_output.scheduling import ConstrainedRows
from tp_engine.grammar.banned_words import WordRulesMaker
from tp_engine.grammar.compiler import GrammarCompiler
from tp_engine.grammar.library import llguidance
from tp_engine.grammar.mask_filler import MaskFiller
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.requests.request import EngineRequest, SequenceDelta
from tp_engine.requests.structured_outputs import PARAM
from tp_engine.sched.scheduler import Scheduler
from tp_engine.system.log import get_logger
from tp_engine.worker.effective_config import EffectiveConfig

logger = get_logger(__name__)

_CHECK_S = 0.1
_NO_TOKENIZER = "structured output needs a fast tokenizer (a tokenizer.json), which this model does not have"


def _has_rules(request: EngineRequest) -> bool:
    """Whether anything but a grammar forbids tokens."""
    return restricting_fields(request) != [PARAM]


def make_compiler(effective: EffectiveConfig) -> GrammarCompiler | RequestError:
    """Return the compiler for this model, or why there is none; takes some seconds for a large vocabulary."""
    config, model = effective.config, effective.model
    source = config.tokenizer or str(effective.model_path)
    try:
        llguidance()
        tokenizer_json = load_tokenizer_json(source, config.revision)
        if tokenizer_json is None:
            return RequestError(_NO_TOKENIZER, param=PARAM)
        defaults = config.structured_outputs_config
        vocabulary = make_vocabulary(tokenizer_json, model.vocab_size, model.eos_token_ids)
        return GrammarCompiler(vocabulary, timeout_s=defaults.compilation_timeout_s)
    except (ValueError, OSError) as error:
        logger.info("requests for structured output will be refused: %s", error)
        return RequestError(str(error), param=PARAM)


def _let_run(scheduler: Scheduler, request_id: str, grammar: Grammar) -> None:
    rows = scheduler.feature(ConstrainedRows)
    assert rows is not None, "the scheduler knows no grammars"
    rows.constrain(request_id, grammar)


class GrammarQueue:
    """The requests of a scheduler that wait for their grammars.  ``masks`` is for that scheduler.  Only the engine's
    own thread calls the methods."""

    def __init__(self, compiler: GrammarCompiler | RequestError, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._words = WordRulesMaker(None if isinstance(compiler, RequestError) else compiler.vocabulary)
        self._wake = threading.Event()
        self._filler = MaskFiller(self._wake.set)
        self.masks = MaskWriter(self._filler, vocab_size)
        self._threads: ThreadPoolExecutor | None = None
        # With a request if its rules are still to be made, once its grammar is there.
        self._waiting: dict[str, tuple[Future[Any], EngineRequest | None]] = {}
        self._is_done = threading.Event()

    def add(self, request: EngineRequest, scheduler: Scheduler) -> None:
        """Queue a request with a grammar or banned words.  ``RequestError``, without any change, if the request cannot
        be served."""
        known: Grammar | None = None
        params = request.params.structured_outputs
        if params is not None:
            if isinstance(self._compiler, RequestError):
                raise RequestError(str(self._compiler), param=self._compiler.param)
            known = self._compiler.known(params)
        scheduler.add(request)
        if params is None or known is not None:
            self._constrain(request, known, scheduler)
            return
        assert isinstance(self._compiler, GrammarCompiler)
        self._wait_for(request.request_id, self._compiler.submit(params), request if _has_rules(request) else None)

    def _constrain(self, request: EngineRequest, grammar: Grammar | None, scheduler: Scheduler) -> None:
        """Let a request run whose grammar is there, or first make its rules in a thread."""
        if grammar is not None and not _has_rules(request):
            _let_run(scheduler, request.request_id, grammar)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-rules")
        self._wait_for(request.request_id, self._threads.submit(self._rules, request, grammar))

    def _rules(self, request: EngineRequest, grammar: Grammar | None) -> TokenRules:
        """The request's rules; ``RequestError`` if they leave no first token."""
        rules = TokenRules(self._words.rules(request, banned_words(request)), request, self._vocab_size, grammar)
        first = rules.start(ignore_eos=request.params.ignore_eos)
        self.masks.wait(first)
        if first.is_over:
            raise RequestError(rules.no_token_left, code=NO_TOKEN_LEFT)
        return rules

    def _wait_for(self, request_id: str, future: Future[Any], with_words: EngineRequest | None = None) -> None:
        self._waiting[request_id] = future, with_words

        def done(_future: Future[Any]) -> None:
            self._is_done.set()
            self._wake.set()

        future.add_done_callback(done)

    def forget(self, request_ids: Iterable[str] | None) -> None:
        """Drop the grammars of these requests, which have been aborted; of all if None."""
        for request_id in list(self._waiting) if request_ids is None else request_ids:
            if request_id in self._waiting:
                self._waiting.pop(request_id)[0].cancel()

    def settle(self, scheduler: Scheduler) -> list[SequenceDelta]:
        """Let requests run whose grammars are compiled; returns the last deltas of those whose grammars failed."""
        if not (self._waiting and self._is_done.is_set()):
            return []
        self._is_done.clear()
        failed: list[SequenceDelta] = []
        for request_id in [one for one, (future, _) in self._waiting.items() if future.done()]:
            future, with_words = self._waiting.pop(request_id)
            error = future.exception()
            if error is None and with_words is not None:
                self._constrain(with_words, future.result(), scheduler)
                continue
            if error is None:
                _let_run(scheduler, request_id, future.result())
                continue
            code = None
            if isinstance(error, RequestError):
                code = error.code or INVALID_GRAMMAR
            else:
                logger.error("request %s: its grammar could not be compiled", request_id, exc_info=error)
            failed += scheduler.abort([request_id], error=str(error), error_code=code)
        return failed

    def settle_all(self, scheduler: Scheduler, check: Callable[[], object]) -> list[SequenceDelta]:
        """Wait until no request waits any more, and settle all; ``check`` raises if waiting is in vain."""
        failed: list[SequenceDelta] = []
        while self._waiting:
            self.wait(_CHECK_S)
            check()
            failed += self.settle(scheduler)
        return failed

    def wait(self, timeout_s: float) -> None:
        """Wait until a grammar is done or a mask found, ``timeout_s`` at most; returns at once if none is in work.

        What has come before the last call may end the next one at once: whoever waits looks again before that."""
        if self._waiting and self._is_done.is_set():
            return
        if self._waiting or self._filler.is_busy:
            self._wake.wait(timeout_s)
            self._wake.clear()

    def close(self) -> None:
        """End what compiles and what finds masks, without waiting for it."""
        self._filler.close()
        if isinstance(self._compiler, GrammarCompiler):
            self._compiler.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
