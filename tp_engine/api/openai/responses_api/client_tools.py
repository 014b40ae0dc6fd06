"""Tools of the Responses API that OpenAI defines and the client runs: what the model sees of them, and their calls.

| tool | the model sees | its call is |
| --- | --- | --- |
| local_shell | one command, as a list of words | local_shell_call, with an action |
| shell (of the client's own environment) | several commands | shell_call, with an action |
| apply_patch | one operation on a file | apply_patch_call, with an operation |
| computer_use_preview, computer | one action, or several | computer_call, with it |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_TEXT, _WHOLE, _TEXTS = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}
_POINT = {"x": _WHOLE, "y": _WHOLE}
_PATH = {"type": "array", "items": {"type": "object", "properties": _POINT, "required": ["x", "y"]}}
# The actions on a computer -> the fields that each needs.
_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "click": ("button", "x", "y"),
    "double_click": ("x", "y"),
    "drag": ("path",),
    "keypress": ("keys",),
    "move": ("x", "y"),
    "screenshot": (),
    "scroll": ("x", "y", "scroll_x", "scroll_y"),
    "type": ("text",),
    "wait": (),
}
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "create_file": ("path", "diff"),
    "update_file": ("path", "diff"),
    "delete_file": ("path",),
}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": [*required], "additionalProperties": False,
    }  # fmt: skip


_ACTION = _object(
    ("type",), type={"type": "string", "enum": [*_ACTIONS]}, **_POINT, scroll_x=_WHOLE, scroll_y=_WHOLE, text=_TEXT,
    button={"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]}, keys=_TEXTS, path=_PATH,
)  # fmt: skip


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value follows one of this module's schemas, except for fields that it does not name."""
    match schema.get("type"):
        case "string":
            return isinstance(value, str) and value in schema.get("enum", (value,))
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list) and all(_fits(one, schema["items"]) for one in value)
    if not isinstance(value, dict) or not value.keys() >= {*schema.get("required", ())}:
        return False
    known, others = schema.get("properties", {}), schema.get("additionalProperties") or {}
    return all(_fits(one, known.get(name, others)) for name, one in value.items() if name in known or others)


def _has(kinds: Mapping[str, tuple[str, ...]]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether an object, which is of one of ``kinds``, has the fields that it needs."""
    return lambda given: given.keys() >= {*kinds[given["type"]]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """The arguments of a call are the object in the ``place`` of its item, None: its fields.  ``added`` are fields of
    the place that a model need not write, and ``beside`` others of the item.  ``is_call`` tells of arguments that
    follow ``parameters`` whether they are complete."""

    name: str
    prefix: str
    place: str | None = "action"
    description: str
    parameters: Mapping[str, Any]
    is_call: Callable[[Mapping[str, Any]], bool] = lambda _: True
    added: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def item(self) -> str:
        """The type of an item that is a call."""
        return f"{self.name}_call"

    def fields(self, arguments: str) -> dict[str, Any] | None:
        """What the item of a call has of its ``arguments``; None if they do not fit this tool."""
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        if not _fits(given, self.parameters) or not self.is_call(given):
            return None
        found = {**self.added, **given}
        return {**self.beside, **({self.place: found} if self.place is not None else found)}


_COMPUTER: dict[str, Any] = {
    "name": "computer",
    "prefix": "cu",
    "beside": {"pending_safety_checks": []},
}
CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        name="local_shell",
        prefix="lsh",
        description="Runs a command on the user's machine and returns its output.",
        parameters=_object(
            ("command",), type={"type": "string", "enum": ["exec"]}, command=_TEXTS,
            env={"type": "object", "additionalProperties": _TEXT}, timeout_ms=_WHOLE,
            user=_TEXT, working_directory=_TEXT,
        ),
        added={"type": "exec", "env": {}},
    ),
    "shell": ClientTool(
        name="shell",
        prefix="sh",
        description="Runs shell commands on the user's machine, each on its own, and returns their output.",
        parameters=_object(("commands",), commands=_TEXTS, timeout_ms=_WHOLE, max_output_length=_WHOLE),
        added={"timeout_ms": None, "max_output_length": None},
        beside={"environment": {"type": "local"}},
    ),
    "apply_patch": ClientTool(
        name="apply_patch",
        prefix="apc",
        place="operation",
        description="Creates, changes or deletes one file.  diff is in the V4A format: for a new file each line begins "
        "with +, else lines of context, and those that begin with - and +, below a line of @@.",
        parameters=_object(("type", "path"), type={"type": "string", "enum": [*_OPERATIONS]}, path=_TEXT, diff=_TEXT),
        is_call=_has(_OPERATIONS),
    ),
    "computer_use_preview": ClientTool(
        **_COMPUTER,
        description="Does one thing with the mouse or the keyboard of a computer; a screenshot is returned.",
        parameters=_ACTION,
        is_call=_has(_ACTIONS),
    ),
    "computer": ClientTool(
        **_COMPUTER,
        place=None,
        description="Does things with the mouse and the keyboard of a computer; a screenshot is returned.",
        parameters=_object(("actions",), actions={"type": "array", "items": _ACTION, "minItems": 1}),
        is_call=lambda given: all(map(_has(_ACTIONS), given["actions"])),
    ),
}  # fmt: skip


def client_tool(tool: Mapping[str, Any]) -> ClientTool | None:
    """The tool that ``tool`` of a body asks for; None for one that OpenAI's servers would run."""
    environment = tool.get("environment")
    kind = environment.get("type") if isinstance(environment, Mapping) and tool.get("type") == "shell" else None
    return None if kind not in (None, "local") else CLIENT_TOOLS.get(str(tool.get("type")))


def described(found: ClientTool, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that the model sees, with the size of the screen that ``tool`` names."""
    size = [tool.get(f"display_{side}") for side in ("width", "height")]
    screen = "  The screen has {} x {} pixels.".format(*size) if all(isinstance(one, int) for one in size) else ""
    return {"name": found.name, "description": found.description + screen, "parameters": dict(found.parameters)}
