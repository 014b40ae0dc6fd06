"""The constraint on the output that an OpenAI body asks for, from all fields that can express one.

| field | becomes |
| --- | --- |
| response_format {"type": "json_schema", "json_schema": {"schema": S}} | json=S |
| response_format {"type": "json_object"} | json_object=True |
| response_format {"type": "json_object", "schema": S} (llama.cpp) | json=S |
| structured_outputs {json, regex, choice, grammar, json_object and options} | the same |
| guided_json, guided_regex, guided_choice, guided_grammar, guided_whitespace_pattern | json, regex, choice, ... |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tp_engine.api.openai.protocol import ChatBody, GenerationBody
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.errors import RequestError, shown
from tp_engine.structured_outputs import PARAM, StructuredOutputsParams

# The prompt decides about what comes first.
_NAMES = frozenset(spec.name for spec in dataclasses.fields(StructuredOutputsParams)) - {"preamble"}
# The place of a tool's parameters in the schema of forced calls.
_DEFINITION = re.compile(r"#/\$defs/([0-9]+)\b")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}


def structured_outputs_of(body: GenerationBody) -> StructuredOutputsParams | None:
    """Return the constraint that a body asks for; None for free text.  Raises ``RequestError`` if it asks for two.

    Of structured_outputs and its former names, which guidance sends for older servers, the newer one counts.
    """
    structured = _of_structured_outputs(body.structured_outputs)
    guided = {name: value for name in _GUIDED if structured is None and (value := getattr(body, name)) is not None}
    found = {
        "response_format": _of_response_format(body.response_format),
        "structured_outputs": structured,
        "guided_*": _named(next(iter(guided)), **{_GUIDED[one]: value for one, value in guided.items()})
        if guided
        else None,
    }
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are set; give only one of them", param=next(iter(given)))
    return next(iter(given.values()), None)


def constraining_field(body: GenerationBody) -> str | None:
    """Return the name of the field of ``body`` that asks for a constraint."""
    fields = ("response_format", PARAM, *_GUIDED)
    return next((name for name in fields if getattr(body, name) is not None), None)


def named_refusal(error: RequestError, body: GenerationBody) -> RequestError:
    """``error`` with the name of the field of ``body`` that asked for the constraint, if the constraint is at fault."""
    if error.param != PARAM:
        return error
    tools = ToolRequest.of(body) if isinstance(body, ChatBody) else None
    if tools is not None and tools.choice != "auto":
        return RequestError(f"tools: {_tool_at_fault(str(error), tools)}{error}", param="tools", code=error.code)
    field = constraining_field(body) or PARAM
    return RequestError(f"{field}: {error}", param=field, code=error.code)


def _tool_at_fault(error: str, tools: ToolRequest) -> str:
    """The tool whose parameters a library's ``error`` is about, if that tells."""
    place, name = _DEFINITION.search(error), tools.name
    if name is None and place is not None and int(place[1]) < len(tools.tools):
        name = tools.tools[int(place[1])]["function"]["name"]
    return "" if name is None else f"the parameters of {shown(name)}: "


def _of_response_format(wanted: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            schema = wanted.get("schema")
            return _named("response_format", **({"json_object": True} if schema is None else {"json": schema}))
        case "json_schema":
            description = wanted.get("json_schema")
            schema = description.get("schema") if isinstance(description, Mapping) else wanted.get("schema")
            if schema is None:
                raise RequestError(
                    "response_format has no json_schema.schema; give the JSON schema there", param="response_format"
                )
            return _named("response_format", json=schema)
        case other:
            raise RequestError(
                f"response_format has the type {shown(other)}; it must be text, json_object or json_schema",
                param="response_format",
            )


def _of_structured_outputs(wanted: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    given = {name: value for name, value in (wanted or {}).items() if value is not None}
    if unknown := sorted(given.keys() - _NAMES):
        raise RequestError(
            f"structured_outputs has the field {shown(unknown[0])}; it may have {', '.join(sorted(_NAMES))}",
            param="structured_outputs",
        )
    return _named("structured_outputs", **given) if given else None


def _named(field: str, **given: Any) -> StructuredOutputsParams:
    """The constraint; errors name ``field`` of the body."""
    try:
        return StructuredOutputsParams(**given)
    except RequestError as error:
        raise RequestError(f"{field}: {error}", param=field) from None


class TokenWriting:
    """How ``tokenizer`` writes marks, for grammars in the Lark syntax of the library."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def special_id(self, mark: str) -> int | None:
        """Return the special token that is ``mark``, None if there is none."""
        return None if self._tokenizer is None else _special_ids(self._tokenizer).get(mark)

    def is_special(self, mark: str) -> bool:
        """Return whether ``mark`` is a special token, which texts leave out by default."""
        return self.special_id(mark) is not None

    def is_one_token(self, mark: str) -> bool:
        """Return whether ``mark`` is a token that no text of a grammar can hold."""
        return self._tokenizer is not None and mark in _grammar_tokens(self._tokenizer)

    def token_id(self, mark: str) -> int | None:
        """Return the one token that is ``mark``, special or not; None if it has several."""
        token_ids = [] if self._tokenizer is None else self._tokenizer.encode(mark, add_special_tokens=False)
        return token_ids[0] if len(token_ids) == 1 else None

    def mark(self, mark: str) -> str:
        """Return what stands for ``mark``: its own token, which may begin it, or its text."""
        special = _grammar_tokens(self._tokenizer) if self._tokenizer is not None else {}
        first = max((token for token in special if token and mark.startswith(token)), key=len, default="")
        rest = json.dumps(mark[len(first) :], ensure_ascii=False) if first != mark else ""
        return " ".join(filter(None, (f"<[{special[first]}]>" if first else "", rest)))

    def any_text(self, rule: str, *marks: str) -> str:
        """Return the rule of a name for any text, in which those of ``marks`` that are tokens may stand."""
        special = (self.mark(mark) for mark in marks if self.is_one_token(mark))
        return f"{rule}: ({' | '.join(('/(?s:.+)/', *special))})*"

    def text_until(self, rule: str, *marks: str) -> str:
        """Return the rule of a name for any text up to the first of ``marks``, and that mark.

        A suffix ends the shortest text that has it; text can not hold a token of its own.
        """
        if self.is_one_token(marks[0]):
            return f"{rule}: /(?s:.*)/ ({' | '.join(map(self.mark, marks))})"
        suffix = json.dumps(marks[0], ensure_ascii=False)
        if len(marks) > 1:
            texts = "|".join(map(re.escape, marks)).replace("/", r"\/")
            suffix = f"/{texts}/"
        return f"{rule}[suffix={suffix}]: /(?s:.*)/"


@lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> Mapping[str, int]:
    """The special tokens, by their text."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {token.content: token_id for token_id, token in added.items() if token.special}


@lru_cache(maxsize=4)
def _grammar_tokens(tokenizer: Any) -> Mapping[str, int]:
    """The tokens that the grammar library keeps apart from text: special ones, and added ones in angle brackets.

    Of the second kind are the ``</think>`` and ``<tool_call>`` of Qwen3, DeepSeek and GLM.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    bracketed = {
        token.content: token_id
        for token_id, token in added.items()
        if token.content.startswith("<") and token.content.endswith(">")
    }
    return {**bracketed, **_special_ids(tokenizer)}
