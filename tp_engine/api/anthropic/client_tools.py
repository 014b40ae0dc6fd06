"""Tools of the Messages API that Anthropic defines and the client runs: bash, the text editor, memory, computer.

The model sees a function with the published schema, under the tool's name; its calls are ``tool_use`` blocks like those
of other functions.  A version is a date; versions differ in their fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tp_engine.api.anthropic.protocol import Tool

_KIND = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")
_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_PAIR = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_INSERTS_TEXT = "20250429"  # before that version of the text editor, the text of an insertion is new_str
_UNDOES = "20250429"  # and undo_edit is a command
_SCROLLS = "20250124"
_ZOOMS = "20251124"
_ACTIONS = ("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click",
            "screenshot", "cursor_position")  # fmt: skip
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


def _bash(_version: str, _tool: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    text = "Runs a command in a bash session that stays open, and returns its output.  restart begins a new session."
    return text, [], {"command": _TEXT, "restart": {"type": "boolean"}}


def _text_editor(version: str, tool: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if version < _UNDOES else [])]
    most = tool.get("max_characters")
    text = (
        "Views and edits files.  view: path, with view_range only some lines"
        + (f", at most {most} characters" if isinstance(most, int) else "")
        + "; create: path, file_text; str_replace: path, old_str, which must stand there once, new_str; insert: path, "
        f"insert_line, behind which {'insert_text' if version >= _INSERTS_TEXT else 'new_str'} comes."
    )
    fields = {"command": _choice(*commands), "path": _TEXT, "view_range": _PAIR, "file_text": _TEXT, "old_str": _TEXT,
              "new_str": _TEXT, "insert_line": _WHOLE}  # fmt: skip
    return text, ["command", "path"], fields | ({"insert_text": _TEXT} if version >= _INSERTS_TEXT else {})


def _memory(_version: str, _tool: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    text = (
        "Keeps notes in files below /memories, which outlast the conversation: look there first.  view: path, a folder "
        "or a file, with view_range only some lines; create: path, file_text; str_replace: path, old_str, new_str; "
        "insert: path, insert_line, insert_text; delete: path; rename: old_path, new_path."
    )
    commands = _choice("view", "create", "str_replace", "insert", "delete", "rename")
    fields = {"command": commands, "path": _TEXT, "view_range": _PAIR, "file_text": _TEXT, "old_str": _TEXT,
              "new_str": _TEXT, "insert_line": _WHOLE, "insert_text": _TEXT, "old_path": _TEXT,
              "new_path": _TEXT}  # fmt: skip
    return text, ["command"], fields


def _computer(version: str, tool: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    actions, fields = [*_ACTIONS], {"coordinate": _PAIR, "text": _TEXT}
    if version >= _SCROLLS:
        actions += _LATER_ACTIONS
        fields |= {"start_coordinate": _PAIR, "scroll_direction": _choice("up", "down", "left", "right"),
                   "scroll_amount": _WHOLE, "duration": {"type": "number"}, "key": _TEXT}  # fmt: skip
    if version >= _ZOOMS and tool.get("enable_zoom"):
        actions.append("zoom")
        fields["region"] = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    text = "Uses the mouse and the keyboard of a computer, and takes screenshots: look before and after each action."
    if isinstance(width, int) and isinstance(height, int):
        text += f"  The screen has {width} x {height} pixels; coordinate is [x, y] in them."
    return text, ["action"], {"action": _choice(*actions), **fields}


_DESCRIBED: Mapping[str, Callable[[str, Mapping[str, Any]], tuple[str, list[str], dict[str, Any]]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}


def client_function(tool: Tool) -> dict[str, Any] | None:
    """The function that stands for a tool that the client runs; None for one that Anthropic's servers run."""
    kind = _KIND.fullmatch(tool.type or "")
    if kind is None:
        return None
    text, required, properties = _DESCRIBED[kind[1]](kind[2], tool.model_extra or {})
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": tool.name, "description": text, "parameters": schema}
