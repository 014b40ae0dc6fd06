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
import re
from collections.abc import Mapping
from typing import Any

from tp_engine.api.openai.protocol import ChatBody, GenerationBody
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.errors import RequestError, shown
from tp_engine.requests.structured_outputs import PARAM, StructuredOutputsParams

# The preamble follows from the prompt.
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
    """The constraint that a body asks for; None for free text.  Raises ``RequestError`` if it asks for two.

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
    """The name of the field of ``body`` that asks for a constraint."""
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
    """The tool whose parameters a library's ``error`` is about, if it says so."""
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
