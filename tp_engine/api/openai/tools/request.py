"""The tools of a chat body and its choice among them, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tp_engine.api.openai.tools.argument_types import ArgumentTypes
from tp_engine.errors import RequestError, shown
from tp_engine.grammar.schema import lenient_schema, normal_schema, object_schema, placed_schema, unkept_keywords

if TYPE_CHECKING:
    from tp_engine.api.openai.protocol import ChatBody  # imports pydantic, which the process that reads schemas lacks

Choice: TypeAlias = Literal["auto", "required", "named"]
_MAX_NAME = 256
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
_WORDS = ("none", "auto", "required")


@dataclass(frozen=True, kw_only=True)
class ToolRequest:
    """The tools that an answer may call.  ``name`` is the function of a ``named`` choice, None otherwise.

    ``several``: more than one call is allowed.  ``num_earlier_calls`` are those in the messages.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: Choice
    name: str | None = None
    several: bool = True
    num_earlier_calls: int = 0

    @classmethod
    def of(cls, body: ChatBody) -> ToolRequest | None:
        """None for a body without tools, and for ``tool_choice: none``.  Raises ``RequestError``."""
        if body.functions:
            raise RequestError("functions is not supported; give tools instead", param="functions")
        tools = tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(body.tools or ()))
        choice, name, allowed = _choice(body.tool_choice)
        if allowed is not None:
            tools = _allowed(tools, allowed)
        if choice == "none" or not tools:
            if choice in ("required", "named"):
                raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
            return None
        names = [tool["function"]["name"] for tool in tools]
        if name is not None and name not in names:
            raise RequestError(
                f"tool_choice names the function {name[:_MAX_NAME]!r}, which is not among the tools",
                param="tool_choice",
            )
        earlier = (message.get("tool_calls") for message in body.messages)
        return cls(
            tools=tools,
            choice=choice,
            name=name,
            several=body.parallel_tool_calls is not False,
            num_earlier_calls=sum(len(calls) for calls in earlier if isinstance(calls, list)),
        )

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @cached_property
    def argument_types(self) -> Mapping[str, ArgumentTypes]:
        """The types of each tool's arguments, by the tool's name; for all sequences of the answer."""
        given = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}
        return {name: ArgumentTypes(schema if isinstance(schema, Mapping) else {}) for name, schema in given.items()}

    def argument_schemas(self) -> list[tuple[str, dict[str, Any]]]:
        """The schemas that forced arguments follow, with the names of the tools that the choice allows.

        All are for objects.  Those of tools that are not ``strict`` leave out what a grammar cannot express; others
        raise ``RequestError``.
        """
        return [
            (tool["function"]["name"], _argument_schema(tool["function"]))
            for tool in self.tools
            if self.name in (None, tool["function"]["name"])
        ]

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the whole output if the choice forces a call, else None.

        ``named``: the function's arguments; ``required``: a list of ``{"name": ..., "parameters": ...}``.
        """
        if self.choice == "auto":
            return None
        schemas = self.argument_schemas()
        if self.choice == "named":
            return schemas[0][1]
        calls = {"anyOf": [_call_schema(name, place) for place, (name, _) in enumerate(schemas)]}
        return {
            "$defs": {str(place): placed_schema(one, f"/$defs/{place}") for place, (_, one) in enumerate(schemas)},
            "type": "array",
            "minItems": 1,
            **({} if self.several else {"maxItems": 1}),
            "items": calls,
        }


def _tool(where: str, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be {{'type': 'function', 'function': {{'name': ...}}}}", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise RequestError(f"{where}.function.name must be a text of 1 to {_MAX_NAME} characters", param="tools")
    if not isinstance(function.get("parameters"), (Mapping, bool, type(None))):
        raise RequestError(f"{where}.function.parameters must be a JSON schema, an object", param="tools")
    return tool


def _choice(given: object) -> tuple[Any, str | None, object]:
    """The choice, the function that it names, and the list of tools that it allows; None for none."""
    if given is None:
        return "auto", None, None
    if isinstance(given, str) and given in _WORDS:
        return given, None, None
    if isinstance(given, Mapping):
        function, limits = given.get("function"), given.get("allowed_tools")
        if given.get("type") == "function" and isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return "named", function["name"], None
        if given.get("type") == "allowed_tools" and isinstance(limits, Mapping):
            mode = limits.get("mode", "auto")
            if isinstance(mode, str) and mode in _WORDS[1:]:
                return mode, None, limits.get("tools") or ()
    raise RequestError(
        f"tool_choice is {shown(given)}; it must be none, auto, required, "
        "{'type': 'function', 'function': {'name': ...}}, or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}",
        param="tool_choice",
    )


def _allowed(tools: Sequence[Mapping[str, Any]], allowed: object) -> tuple[Mapping[str, Any], ...]:
    functions = (
        [one.get("function") for one in allowed if isinstance(one, Mapping)] if isinstance(allowed, list) else []
    )
    names = {str(function.get("name")) for function in functions if isinstance(function, Mapping)}
    found = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if not found:
        raise RequestError("tool_choice allows none of the tools; name at least one of them", param="tool_choice")
    return found


def _argument_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; one without parameters takes an empty object."""
    given, whose = function.get("parameters") or _NO_PARAMETERS, f"tools: the parameters of {function['name']!r}"
    try:
        if function.get("strict") is not True:
            return object_schema(lenient_schema(given)) or _ANY_ARGUMENTS
        found = object_schema(given)
        if found is None:
            raise RequestError(f"{whose} allow no object, which arguments are", param="tools")
        unkept = list(islice(unkept_keywords(normal_schema(found)), 1))
    except RecursionError:
        raise RequestError(f"{whose} are nested too deeply", param="tools") from None
    if unkept:
        keyword, place = unkept[0]
        raise RequestError(
            f"{whose} have the keyword {keyword} at {place}, which the output could not keep; "
            "leave it out, or leave strict out",
            param="tools",
        )
    return found


def _call_schema(name: str, place: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "parameters": {"$ref": f"#/$defs/{place}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
