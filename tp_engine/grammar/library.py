"""The one door to llguidance: the library, and from ``StructuredOutputsParams`` to its own grammar text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tp_engine.errors import RequestError
from tp_engine.grammar.schema import normal_schema, unkept_keywords
from tp_engine.structured_outputs import StructuredOutputsParams

PARAM = "structured_outputs"

# Some models write white space without end, so it is limited to some blanks, or a line end and an indentation.
WHITESPACE = r"[\x20\x09]{1,8}|\x0D?\x0A[\x20\x09]{0,20}"
_BOOLEAN_SCHEMAS = {"true": "{}", "false": '{"enum":[]}'}
_ANY_OBJECT = '{"type":"object"}'

# What the library says of schemas that it does not take.
_UNKEPT, _ONE_OF = "Unimplemented keys", "oneOf constraints are not supported"
_MAX_PLACES = 5
_ANSWER = "answer"
# The rule of a preamble for white space in front of the answer.
_SPACE = "space: SPACE?\nSPACE: /[ \\n\\r\\t]{1,8}/\n"
_NO_SPACE = 'space: ""\n'


def llguidance() -> Any:
    """The library.  ``RequestError`` if it can not be imported; requests for free text are served without it."""
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            f"structured output needs the package llguidance, which can not be imported here ({error}): install it "
            "with pip install 'llguidance>=1.9', or ask for free text",
            param=PARAM,
        ) from error
    return library


def parser_limits() -> Any:
    """Limits of one grammar: the time to compile it and to find the next tokens, and the memory for its states.

    A state takes one to two kilobytes.  Ordinary schemas have a few hundred states.
    """
    return llguidance().LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The constraint ``params`` as a grammar of the library.  ``RequestError`` if the library can not read it."""
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
            texts = (json.dumps(one, ensure_ascii=False) for one in params.choice or ())
            text = matcher.grammar_from_lark("start: " + " | ".join(texts))
        case _:
            text = library.grammar_from("grammar", params.grammar)
    return text


def refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    """The error for a grammar that the library refuses, with the library's reason."""
    what = {"json": "the JSON schema", "choice": "the choice", "json_object": "the white space"}.get(params.kind)
    brief = " ".join(_explained(params, reason).replace("<non-verbose/>", "").split())[:500]
    return RequestError(f"{what or f'the {params.kind}'} can not be used: {brief}", param=PARAM)


def _explained(params: StructuredOutputsParams, reason: str) -> str:
    """``reason`` with the places that the library does not tell, and the remedies that are here."""
    if params.kind == "json" and reason.startswith(_UNKEPT):
        found = unkept_keywords(normal_schema(json.loads(str(params.json))))
        places = ", ".join(f"{name} at {place}" for name, place in found[:_MAX_PLACES])
        return f"the output could not keep {places}; leave such keywords out"
    if reason.startswith(_ONE_OF):
        return "a value could fit two branches of a oneOf; make them exclude each other, or use anyOf"
    return reason


def inner_schema(schema: Mapping[str, Any], like: StructuredOutputsParams) -> str:
    """A JSON ``schema`` as ``%json`` of a Lark grammar takes it, with white space and properties as ``like`` says."""
    found = normal_schema(schema)
    return json.dumps(
        {"x-guidance": _json_options(like), **(_closed(found) if like.disable_additional_properties else found)}
    )


def _schema(params: StructuredOutputsParams) -> str:
    schema = normal_schema(json.loads(_BOOLEAN_SCHEMAS.get(str(params.json), str(params.json))))
    return json.dumps(_closed(schema) if params.disable_additional_properties else schema, ensure_ascii=False)


def _closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` where properties are listed and that key is missing."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _behind(first: str, grammar: str) -> str:
    """``grammar`` (the library's JSON, or Lark) as the ``@answer`` of the Lark rules ``first``."""
    library_json = grammar.lstrip().startswith("{")
    parts = json.loads(grammar)["grammars"] if library_json else [{"lark_grammar": grammar}]
    parts[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]})
