"""Values of arguments that models write as plain text, typed by the tool's JSON schema."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from tp_engine.grammar.schema_types import SchemaRoot, types_of

Types = frozenset[str]
_STRING: Types = frozenset({"string"})
_MAX_PYTHON = 10_000


class ArgumentTypes:
    """The types of one tool's arguments; ``parameters`` is the JSON schema of all of them.  For all sequences of a
    request: each part of the schema is read once."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._root = SchemaRoot(parameters)
        self.names = tuple(self._properties)  # in the order in which they may come without a key

    def of(self, key: str) -> Types | None:
        """The JSON types that argument ``key`` may have; None if the schema does not say."""
        return self._root.allowed_types(self._properties.get(key)) or None

    def lacks(self, key: str) -> bool:
        """Whether the schema names arguments, and ``key`` is none of them."""
        return bool(self._properties) and key not in self._properties


NO_TYPES = ArgumentTypes({})


def is_text(types: Types | None) -> bool:
    """Whether a value of ``types`` is text, however it looks."""
    return types == _STRING


def json_value(text: str, types: Types | None) -> str:
    """The JSON text of a value that the model wrote as ``text``; what does not fit ``types`` is a string."""
    as_string = json.dumps(text, ensure_ascii=False)
    if is_text(types):
        return as_string
    stripped = text.strip()
    lowered = stripped.lower()
    may_be_text = types is not None and "string" in types
    if types is not None and lowered in ("null", "none") and ("null" in types or not may_be_text):
        return "null"
    if types is not None and lowered in ("true", "false") and "boolean" in types:
        return lowered
    found = parsed_json(stripped)
    if found is None and types is not None and not may_be_text:
        found = _python(stripped)
    if found is None:
        return as_string
    written, value = found
    return as_string if may_be_text and not (set(types_of(value)) - _STRING) & set(types or ()) else written


def parsed_json(text: str) -> tuple[str, Any] | None:
    """``text`` as JSON and its value, if it is JSON; raw control characters in its strings become escapes."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        if any(char < " " for char in text):
            text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text, value


def _python(text: str) -> tuple[str, Any] | None:
    """A literal in Python's spelling, such as ``{'a': True}``, as JSON and its value; None for any other text."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
