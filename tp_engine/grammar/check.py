"""Whether a request's constraint can be used, found before the request is sent to the engine."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from tp_engine.errors import ConfigError, RequestError
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.library import llguidance, parser_limits
from tp_engine.grammar.source import grammar_text, refusal
from tp_engine.grammar.vocabulary import GrammarVocabulary, byte_vocabulary, check_tokenizer
from tp_engine.structured_outputs import CONFIG_NAME, StructuredOutputsDefaults, StructuredOutputsParams


def check_constraint(params: StructuredOutputsParams, tokenizer: Any | None) -> None:
    """Raise ``RequestError`` if ``params`` can not be compiled, or not with this tokenizer."""
    check_tokenizer(tokenizer)
    check_grammar(params)


def check_defaults(defaults: StructuredOutputsDefaults) -> None:
    """Raise ``ConfigError`` for an engine's own white space that the library refuses."""
    if defaults.whitespace_pattern is None:
        return
    try:
        check_grammar(defaults.probe())
    except RequestError as error:
        raise ConfigError(f"{CONFIG_NAME} can not be used: {error}") from error


@lru_cache(maxsize=256)
def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise ``RequestError`` if ``params`` can not be compiled.

    Milliseconds, most of them without the GIL, and nothing for one of the last constraints.  A grammar is compiled for
    an alphabet of bytes here, which is as telling as the model's own vocabulary and costs no time to load; a grammar
    that names special tokens is only read.
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
