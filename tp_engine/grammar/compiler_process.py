"""Compiles each grammar in a separate process first, where it may crash, or use up its time and memory."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tp_engine.errors import RequestError
from tp_engine.grammar.library import (
    SpecialTokens,
    byte_tokens,
    grammar_text,
    llguidance,
    new_matcher,
    parser_limits,
    refusal,
    timed_mask,
)
from tp_engine.requests.structured_outputs import PARAM, StructuredOutputsParams
from tp_engine.system.closing import Closing
from tp_engine.system.isolation.process import (
    CallError,
    CancelledCallError,
    CrashedError,
    IsolatedProcess,
    Limits,
    OutOfTimeError,
)
from tp_engine.system.units import MIB

_MEMORY_BYTES = 256 * MIB
_NUM_TRIED = 4
_MOST_MASK_S = 0.1
_STACK_BYTES = 4 * MIB  # less than the threads have that then compile the grammar


class TookTooLongError(RequestError):
    """A grammar that was not compiled within its time."""


@dataclass(frozen=True, slots=True)
class TriedGrammar:
    """A grammar that can be compiled: its text for the library, and the bytes of memory that it took."""

    text: str
    num_bytes: int


class CompilerProcess(Closing):
    """The process; it starts with the first grammar.  For any thread.

    ``special_tokens`` are those that grammars may name; without them, a grammar that names one is only parsed.
    """

    def __init__(self, special_tokens: SpecialTokens | None) -> None:
        self._special = "" if special_tokens is None else json.dumps(dataclasses.asdict(special_tokens))
        self._process = IsolatedProcess(prepare=(tokens_of, self._special))

    def try_out(self, params: StructuredOutputsParams, *, cpu_s: float, niceness: int = 0) -> TriedGrammar:
        """Compile ``params`` there, within ``cpu_s`` seconds of processor time.

        Raises ``RequestError`` if that fails, ``TookTooLongError`` if the time was too short, ``RuntimeError`` if the
        process itself cannot run, and ``CancelledCallError`` if nobody waits any more.
        """
        job = json.dumps({"params": dataclasses.asdict(params), "special": self._special}).encode()
        limits = Limits(cpu_s=cpu_s, memory_bytes=_MEMORY_BYTES, stack_bytes=_STACK_BYTES, niceness=niceness)
        try:
            answer = self._process.call(try_out, job, limits)
            return TriedGrammar(bytes(answer.output).decode(), answer.peak_bytes)
        except OutOfTimeError:
            error = refusal(params, f"it takes more than {cpu_s:g} s to compile; make it simpler")
            raise TookTooLongError(str(error), param=PARAM) from None
        except CrashedError as error:
            if error.is_overflow:
                raise refusal(params, "it is nested too deeply for the grammar library; make it flatter") from None
            raise RequestError(f"the grammar library failed: {error}", param=PARAM) from None
        except CancelledCallError:
            raise
        except CallError as error:
            raise refusal(params, f"it {error} to compile; make it simpler") from None

    def close(self) -> None:
        """End the process; ``try_out`` then raises ``RuntimeError``."""
        self._process.close()


@cache
def tokens_of(special: str) -> Any:
    """The library's tokenizer of the special tokens in this JSON; the process makes it once."""
    return byte_tokens(SpecialTokens(**json.loads(special))) if special else byte_tokens()


def try_out(job: bytes) -> bytes:
    """Compile a grammar and find its first tokens; returns its text.  Raises ``RequestError`` if it cannot be used."""
    given = json.loads(job)
    params, warnings = StructuredOutputsParams(**given["params"]), []
    text = grammar_text(params)
    if not given["special"]:
        is_error, warnings = llguidance().LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits())
        if is_error:
            raise refusal(params, warnings[0])
    if not any("no tokenizer" in warning for warning in warnings):
        tokens = tokens_of(given["special"])
        matcher, _ = new_matcher(params, tokens, text, most_mask_s=_MOST_MASK_S)
        _check_masks(params, matcher)
    return text.encode()


def _check_masks(params: StructuredOutputsParams, matcher: Any) -> None:
    """Refuse a grammar in which it takes long to find the tokens that may follow its first ones: rank 0 must search a
    whole vocabulary, which takes longer."""
    for _ in range(_NUM_TRIED):
        mask = timed_mask(params, matcher, _MOST_MASK_S)
        place = next((place for place, bits in enumerate(mask) if bits), None)
        if place is None or not matcher.try_consume_tokens([8 * place + (mask[place] & -mask[place]).bit_length() - 1]):
            break
