"""The tools of a response: what the model sees of them, and what its calls are in the answer.

| tool of the body | the model sees | its call is |
| --- | --- | --- |
| function | the function | function_call |
| custom | a function with one text, ``input`` | custom_tool_call |
| namespace | its functions, as ``NAMESPACE__NAME`` | function_call with a namespace |
| one of ``client_tools.py``, which the client runs | a function with the published schema | the tool's own item |
| any other kind: a server would run it | nothing; the log says so | - |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pydantic_core import from_json

from tp_engine.api.openai.responses_api.client_tools import CLIENT_TOOLS, ClientTool, client_tool, described
from tp_engine.errors import RequestError, shown
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_INPUT = "input"
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that the model may call.  ``function`` is its form in a chat; ``name`` and ``namespace`` are the client's
    names.  ``is_custom``: its argument is plain text.  ``client``: it is one that OpenAI defines."""

    function: Mapping[str, Any]
    name: str
    namespace: str | None = None
    is_custom: bool = False
    client: ClientTool | None = None

    def within(self, namespace: str | None) -> CallableTool:
        """The tool as one of ``namespace``; as it is for None."""
        if namespace is None:
            return self
        return replace(self, function={**self.function, "name": flat_name(namespace, self.name)}, namespace=namespace)


@dataclass(frozen=True)
class ResponseTools:
    """``tools`` may be called; ``left_out`` are the kinds of those that only another server could run."""

    tools: tuple[CallableTool, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, tools: Iterable[Mapping[str, Any]]) -> ResponseTools:
        """The tools of a body.  Raises ``RequestError``."""
        found: list[CallableTool] = []
        left_out: dict[str, None] = {}
        for number, tool in enumerate(tools):
            for where, one, namespace in _flattened(f"tools[{number}]", tool):
                kind = one.get("type") if isinstance(one, Mapping) else None
                if not isinstance(kind, str):
                    raise RequestError(
                        f"{where} has the type {shown(kind, 60)}; it must be text, such as function", param="tools"
                    )
                client = client_tool(one)
                if kind in _CALLABLE:
                    found.append(_CALLABLE[kind](where, one).within(namespace))
                elif client is not None:
                    found.append(CallableTool(function=described(client, one), name=client.name, client=client))
                else:
                    left_out[kind] = None
                    warn_once(
                        logger, "tools of the type %s are left out of responses: this server runs none", shown(kind, 60)
                    )
        return cls(tuple(found), tuple(left_out))

    @cached_property
    def _by_name(self) -> Mapping[Any, CallableTool]:
        return {tool.function["name"]: tool for tool in reversed(self.tools)}

    def called(self, name: str) -> CallableTool:
        """The tool that the model calls by ``name``; one that the body lacks is a function of that name."""
        return self._by_name.get(name) or CallableTool(function={"name": name}, name=name)

    def for_chat(self, choice: str | Mapping[str, Any] | None) -> tuple[list[dict[str, Any]] | None, Any]:
        """``tools`` and ``tool_choice`` of the chat, None for none.  Raises ``RequestError``."""
        if choice is None or isinstance(choice, str):
            if choice == "required":
                self._require(self.tools, "tool_choice is required")
            return _chat_tools(self.tools), choice if self.tools or choice not in ("auto", "none") else None
        kind = choice.get("type")
        if kind in _CALLABLE or kind in CLIENT_TOOLS:
            name = next(iter(self._flat_names([choice])), choice.get("name"))
            return _chat_tools(self.tools), {"type": "function", "function": {"name": name}}
        if kind == "allowed_tools":
            mode, allowed = choice.get("mode", "auto"), self._allowed(choice)
            if mode == "required":
                self._require(allowed, "tool_choice requires one of its tools")
            return _chat_tools(allowed), mode if allowed else None
        raise RequestError(
            f"tool_choice has the type {shown(kind, 60)}, which this server does not run; it must be function, custom, "
            "allowed_tools or a tool that the client runs, or one of the words auto, none, required",
            param="tool_choice",
        )

    def _require(self, tools: Sequence[CallableTool], what: str) -> None:
        if not tools and self.left_out:
            kinds = ", ".join(shown(kind, 60) for kind in self.left_out[:8])
            raise RequestError(
                f"{what}, but this server runs no tools of the type {kinds}; give a function that the client runs",
                param="tool_choice",
            )

    def _flat_names(self, entries: Iterable[Mapping[str, Any]]) -> set[Any]:
        """The names in the chat of the tools that ``entries`` name.

        A tool of a namespace may be named by its own name, if no other tool has that.
        """
        flat = {tool.function["name"] for tool in self.tools}
        num_own = Counter(tool.name for tool in self.tools)
        own = {tool.name: tool.function["name"] for tool in self.tools if num_own[tool.name] == 1}
        found = set()
        for entry in entries:
            kind, namespace = entry.get("type"), entry.get("namespace")
            name = CLIENT_TOOLS[str(kind)].name if kind in CLIENT_TOOLS else entry.get("name")
            if isinstance(name, str):
                known = name if name in flat else own.get(name, name)
                found.add(known if namespace is None else flat_name(namespace, name))
        return found

    def _allowed(self, choice: Mapping[str, Any]) -> list[CallableTool]:
        named = choice.get("tools")
        entries = [one for one in named if isinstance(one, Mapping)] if isinstance(named, list) else []
        names = self._flat_names(entries)
        namespaces = {str(one.get("name")) for one in entries if one.get("type") == "namespace"}
        allowed = [tool for tool in self.tools if tool.function["name"] in names or tool.namespace in namespaces]
        if not allowed and not any(one.get("type") in self.left_out for one in entries):
            raise RequestError("tool_choice allows none of the tools; name at least one of them", param="tool_choice")
        return allowed


def flat_name(namespace: object, name: object) -> str:
    """The name that the model sees for a function of a namespace, as in vLLM."""
    return f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool which is called with ``text``."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text that a custom tool was called with, as far as it has arrived; arguments of another form are the text."""
    try:
        text = from_json(arguments, allow_partial="trailing-strings")[_INPUT]
    except (ValueError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def _flattened(where: str, tool: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """The place of each tool, the tool, and its namespace: the tools of a namespace, or ``tool`` alone."""
    if tool.get("type") != "namespace":
        yield where, tool, None
        return
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        raise RequestError(f"{where} is a namespace; it must have a name and a list of tools", param="tools")
    for number, one in enumerate(tools):
        yield f"{where}.tools[{number}]", one, name


def _function(where: str, tool: Mapping[str, Any]) -> CallableTool:
    name = tool.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{where}.name is {shown(name, 60)}; it must be text", param="tools")
    if not isinstance(tool.get("parameters"), (Mapping, type(None))):
        raise RequestError(f"{where}.parameters must be a JSON schema, an object", param="tools")
    function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
    return CallableTool(function=function, name=name)


def _custom(where: str, tool: Mapping[str, Any]) -> CallableTool:
    """The function that stands for a custom tool; the model knows a grammar from the description alone."""
    form = tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        warn_once(logger, "custom tools have a grammar, which is not enforced")
    shim = {"name": tool.get("name"), "description": tool.get("description"), "parameters": _INPUT_SCHEMA}
    return replace(_function(where, shim), is_custom=True)


# By kind of tool that the model may call: the tool.
_CALLABLE: Mapping[str, Callable[[str, Mapping[str, Any]], CallableTool]] = {"function": _function, "custom": _custom}


def _chat_tools(tools: Sequence[CallableTool]) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": dict(tool.function)} for tool in tools] or None
