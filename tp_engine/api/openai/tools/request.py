"""The tools of a chat body and its choice among them, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tp_engine.api.openai.protocol import ChatBody
from tp_engine.errors import RequestError

Choice: TypeAlias = Literal["auto", "required", "named"]
_MAX_NAME = 256
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_WORDS = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """The tools that an answer may call.  ``name`` is the function of a ``named`` choice, None otherwise.

    ``several``: more than one call is allowed.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: Choice
    name: str | None = None
    several: bool = True

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
        return cls(tools=tools, choice=choice, name=name, several=body.parallel_tool_calls is not False)

    @property
    def names(self) -> frozenset[str]:
        """The tools' names."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def parameters(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: _parameters(tool) for tool in self.tools}

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the whole output if the choice forces a call, else None.

        ``named``: the function's arguments; ``required``: a list of ``{"name": ..., "parameters": ...}``.
        """
        if self.choice == "auto":
            return None
        if self.choice == "named":
            return next(_parameters(tool) for tool in self.tools if tool["function"]["name"] == self.name)
        calls = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(tool) for tool in self.tools]}}
        calls |= {} if self.several else {"maxItems": 1}
        definitions = {keyword: _definitions(self.tools, keyword) for keyword in _DEFINITIONS}
        return calls | {keyword: found for keyword, found in definitions.items() if found}


def _tool(where: str, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be {{'type': 'function', 'function': {{'name': ...}}}}", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise RequestError(f"{where}.function.name must be a text of 1 to {_MAX_NAME} characters", param="tools")
    if not isinstance(function.get("parameters"), (Mapping, type(None))):
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
        f"tool_choice is {repr(given)[:80]}; it must be none, auto, required, "
        "{'type': 'function', 'function': {'name': ...}}, or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}",
        param="tool_choice",
    )


def _allowed(tools: Sequence[Mapping[str, Any]], allowed: object) -> tuple[Mapping[str, Any], ...]:
    functions = (
        [one.get("function") for one in allowed if isinstance(one, Mapping)] if isinstance(allowed, list) else []
    )
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    found = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if not found:
        raise RequestError("tool_choice allows none of the tools; name at least one of them", param="tool_choice")
    return found


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without parameters takes an empty object."""
    return dict(tool["function"].get("parameters") or _NO_PARAMETERS)


def _call_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {key: value for key, value in _parameters(tool).items() if key not in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool["function"]["name"]]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(tools: Sequence[Mapping[str, Any]], keyword: str) -> dict[str, Any]:
    """The definitions that the tools' parameters refer to; references start at the root of the whole schema."""
    found: dict[str, Any] = {}
    for tool in tools:
        own = _parameters(tool).get(keyword)
        for name, schema in own.items() if isinstance(own, Mapping) else ():
            if found.setdefault(name, schema) != schema:
                raise RequestError(
                    f"two tools define {keyword}/{name} differently; give one of them another name", param="tools"
                )
    return found
