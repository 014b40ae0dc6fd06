"""The one door to llguidance: the library, and the grammar text that it reads for ``StructuredOutputsParams``."""

import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import INVALID_GRAMMAR, RequestError
from tp_engine.grammar.closed_schema import closed_schema
from tp_engine.grammar.schema import normal_schema, unkept_keywords
from tp_engine.requests.structured_outputs import PARAM, StructuredOutputsParams
from tp_engine.system.panics import panics_refused

# Some models write white space without end, so it is limited to a few blanks, or a line end and an indentation.
WHITESPACE = r"[\x20\x09]{1,8}|\x0D?\x0A[\x20\x09]{0,20}"
_BOOLEAN_SCHEMAS = {"true": "{}", "false": '{"enum":[]}'}
_ANY_OBJECT = '{"type":"object"}'

# What the library says of schemas that it refuses.
_UNKEPT, _ONE_OF = "Unimplemented keys", "oneOf constraints are not supported"
_MAX_PLACES = 5
# The beginning of a schema within Lark, but not in strings, expressions or comments.
_JSON_PART = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<head>%json\s*)(?=\{)')
_NUM_BYTES = 256
_ANSWER = "answer"
# The rule of a preamble for white space in front of the answer.
_SPACE = "space: SPACE?\nSPACE: /[ \\n\\r\\t]{1,8}/\n"
_NO_SPACE = 'space: ""\n'


def llguidance() -> Any:
    """The library.  Raises ``RequestError`` if it cannot be imported; free text is served without it."""
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            f"structured output needs the package llguidance, which cannot be imported here ({error}): install it "
            "with pip install 'llguidance>=1.9', or ask for free text",
            param=PARAM,
        ) from error
    return library


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The special tokens that grammars may name, pairs of id and text, of a vocabulary of ``num_tokens``."""

    num_tokens: int
    tokens: Sequence[tuple[int, str]]


_BYTES_ALONE = SpecialTokens(num_tokens=_NUM_BYTES + 1, tokens=((_NUM_BYTES, "<end>"),))


def byte_tokens(special: SpecialTokens = _BYTES_ALONE) -> Any:
    """The library's tokenizer with one token per byte and the ``special`` ones: enough to try a grammar out."""
    texts = dict(special.tokens) or {max(special.num_tokens, _NUM_BYTES): "<end>"}
    free = (token_id for token_id in itertools.count() if token_id not in texts)
    texts_of = {next(free): bytes((value,)) for value in range(_NUM_BYTES)}
    texts_of |= {token_id: text.encode() for token_id, text in texts.items()}

    class Tokens:
        eos_token_id = next(iter(texts))
        bos_token_id = None
        tokens = tuple(texts_of.get(token_id, b"") for token_id in range(max(special.num_tokens - 1, *texts_of) + 1))
        special_token_ids = tuple(texts)

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    library = llguidance()
    return library.LLTokenizer(library.TokenizerWrapper(Tokens()))


@panics_refused("the grammar cannot be used", PARAM)
def new_matcher(
    params: StructuredOutputsParams, tokens: Any, text: str | None = None, *, most_mask_s: float = math.inf
) -> tuple[Any, bytes]:
    """The library's matcher before the first token, for its tokenizer ``tokens``, and the mask of that token.

    ``text`` is the ``grammar_text``, if it is known.  Takes milliseconds for ordinary schemas, mostly without the GIL.
    Raises ``RequestError`` for unusable ``params``, also if they allow no output at all, or if finding the tokens that
    may come first takes more than ``most_mask_s`` of processor time.
    """
    written = grammar_text(params) if text is None else text
    matcher = llguidance().LLMatcher(tokens, written, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(params, matcher.get_error())
    first = matcher.deep_copy()
    mask = timed_mask(params, first, most_mask_s)
    if first.is_error() or mask.count(0) == len(mask):
        raise refusal(params, f"no output fits it {first.get_error()}")
    return matcher, mask


def timed_mask(params: StructuredOutputsParams, matcher: Any, most_s: float) -> bytes:
    """The mask of the tokens that may follow; ``RequestError`` if it takes more than ``most_s``."""
    began_s = time.thread_time()
    mask: bytes = matcher.compute_bitmask()
    if time.thread_time() - began_s > most_s:
        raise refusal(params, "finding the tokens that may follow takes too long; make it simpler")
    return mask


def parser_limits() -> Any:
    """Limits of one grammar: its size, the time to find the next tokens, and the memory for its states.

    A state takes one to two kilobytes.  Ordinary schemas have a few hundred states, and up to 7,000 symbols.
    """
    return llguidance().LLParserLimits(max_lexer_states=50_000, max_grammar_size=20_000, verbose_errors=False)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The constraint ``params`` as a grammar of the library.  Raises ``RequestError`` if the library cannot read it."""
    try:
        text = _grammar_text(params)
        if params.preamble is None:
            return text
        return _behind(params.preamble + "\n" + (_NO_SPACE if params.disable_any_whitespace else _SPACE), text)
    except RecursionError as error:
        raise refusal(params, "it is nested too deeply") from error
    except ValueError as error:
        raise refusal(params, str(error)) from error


def _grammar_text(params: StructuredOutputsParams) -> str:
    library = llguidance()
    matcher = library.LLMatcher
    match params.kind:
        case "json":
            text: str = matcher.grammar_from_json_schema(_schema(params), defaults=_json_options(params))
        case "json_object":
            text = matcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_json_options(params))
        case "regex":
            text = matcher.grammar_from_regex(params.regex)
        case "choice":
            # One terminal: for alternatives of a rule the library takes quadratic time.
            texts = (json.dumps(one, ensure_ascii=False) for one in params.choice or ())
            text = matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
        case _:
            text = library.grammar_from("grammar", _with_bounded_space(str(params.grammar), params))
    return text


def _with_bounded_space(grammar: str, params: StructuredOutputsParams) -> str:
    """``grammar``, whose ``%json`` schemas get the bounded white space, unless they say otherwise."""
    decoder, parts, end = json.JSONDecoder(), list[str](), 0
    while (found := _JSON_PART.search(grammar, end)) is not None:
        parts.append(grammar[end : found.end()])
        end = found.end()
        if found["head"] is not None:
            with contextlib.suppress(ValueError):  # the library says what is wrong
                schema, end = decoder.raw_decode(grammar, end)
                parts.append(json.dumps({"x-guidance": _json_options(params), **schema}, ensure_ascii=False))
    return "".join(parts) + grammar[end:]


def refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    """The error for a grammar that the library refuses, with the library's reason."""
    what = {"json": "the JSON schema", "choice": "the choice", "json_object": "the white space"}.get(params.kind)
    brief = " ".join(_explained(params, reason).replace("<non-verbose/>", "").split())[:500]
    return RequestError(f"{what or f'the {params.kind}'} cannot be used: {brief}", param=PARAM, code=INVALID_GRAMMAR)


def _explained(params: StructuredOutputsParams, reason: str) -> str:
    """``reason``, with the places that the library does not tell, and with our remedies."""
    if params.kind == "json" and reason.startswith(_UNKEPT):
        found = unkept_keywords(normal_schema(json.loads(str(params.json))))
        places = ", ".join(f"{name} at {place}" for name, place in itertools.islice(found, _MAX_PLACES))
        return f"the output could not keep {places}; leave such keywords out"
    if reason.startswith(_ONE_OF):
        return "a value could fit two branches of a oneOf; make them exclude each other, or use anyOf"
    return reason


def inner_schema(schema: Mapping[str, Any], like: StructuredOutputsParams) -> str:
    """A JSON ``schema`` as ``%json`` of a Lark grammar takes it, with white space and properties as in ``like``."""
    return json.dumps({"x-guidance": _json_options(like), **_taken(schema, like)})


def _schema(params: StructuredOutputsParams) -> str:
    schema = json.loads(_BOOLEAN_SCHEMAS.get(str(params.json), str(params.json)))
    return json.dumps(_taken(schema, params), ensure_ascii=False)


def _taken(schema: Any, like: StructuredOutputsParams) -> Any:
    """``schema`` as the library takes it, closed unless ``like`` says otherwise."""
    return normal_schema(schema) if like.disable_additional_properties is False else closed_schema(schema)


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _behind(first: str, grammar: str) -> str:
    """``grammar``, the library's JSON or Lark, as the ``@answer`` of the Lark rules ``first``."""
    library_json = grammar.lstrip().startswith("{")
    parts = json.loads(grammar)["grammars"] if library_json else [{"lark_grammar": grammar}]
    parts[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]})
