"""Compiles grammars for one model, and checks a request's constraint before the request is sent to the engine."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tp_engine.errors import ConfigError, RequestError
from tp_engine.grammar.library import grammar_text, llguidance, parser_limits, refusal
from tp_engine.grammar.matcher import GrammarMatcher
from tp_engine.grammar.vocabulary import GrammarVocabulary, byte_vocabulary, check_tokenizer
from tp_engine.plan import IntArray
from tp_engine.structured_outputs import CONFIG_NAME, StructuredOutputsDefaults, StructuredOutputsParams

_MAX_REMEMBERED = 32


class CompiledGrammar:
    """A grammar before its first token; every sequence gets a copy."""

    def __init__(self, matcher: Any, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """A matcher before its first token; takes microseconds."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, ignore_eos=ignore_eos)


def compile_grammar(params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Takes milliseconds for ordinary schemas, mostly without the GIL.  ``RequestError`` for unusable ``params``."""
    matcher = llguidance().LLMatcher(vocabulary.tokens, grammar_text(params), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(params, matcher.get_error())
    _check_beginning(params, matcher.deep_copy(), vocabulary)
    return CompiledGrammar(matcher, vocabulary)


def _check_beginning(params: StructuredOutputsParams, matcher: Any, vocabulary: GrammarVocabulary) -> None:
    """Refuse a grammar that allows no output: no first token, and no empty output."""
    own: IntArray = np.zeros(vocabulary.num_own_words, dtype=np.int32)
    with contextlib.suppress(ValueError):
        matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
    if matcher.is_error() or not own.any():
        raise refusal(params, f"no output fits it {matcher.get_error()}")


class GrammarCompiler:
    """Compiles for one vocabulary and remembers the last grammars.  Safe to call from several threads."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()

    def known(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """The grammar if it is among the last ones."""
        with self._lock:
            found = self._known.get(params)
            if found is not None:
                self._known.move_to_end(params)
            return found

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar, compiled unless it is known.  ``RequestError`` for unusable ``params``."""
        found = self.known(params)
        if found is None:
            found = compile_grammar(params, self.vocabulary)
            with self._lock:
                self._known[params] = found
                if len(self._known) > _MAX_REMEMBERED:
                    self._known.popitem(last=False)
        return found


def check_constraint(params: StructuredOutputsParams, tokenizer: Any | None) -> None:
    """Raise ``RequestError`` if ``params`` can not be compiled, or not with this tokenizer."""
    check_tokenizer(tokenizer)
    check_grammar(params)


def check_defaults(defaults: StructuredOutputsDefaults) -> None:
    """Raise ``ConfigError`` if the library refuses the white space of the engine's configuration."""
    if defaults.whitespace_pattern is None:
        return
    try:
        check_grammar(defaults.probe())
    except RequestError as error:
        raise ConfigError(f"{CONFIG_NAME} can not be used: {error}") from error


@lru_cache(maxsize=256)
def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise ``RequestError`` if ``params`` can not be compiled.

    Takes milliseconds, mostly without the GIL, and no time for one of the last constraints.  The grammar is compiled
    for an alphabet of bytes, which finds the same errors as the model's vocabulary and needs no loading; a grammar that
    names special tokens is only parsed.
    """
    is_error, found = llguidance().LLMatcher.validate_grammar_with_warnings(
        grammar_text(params), None, limits=parser_limits()
    )
    if is_error:
        raise refusal(params, found[0])
    if not any("no tokenizer" in warning for warning in found):
        compile_grammar(params, _bytes())


@cache
def _bytes() -> GrammarVocabulary:
    return byte_vocabulary()
