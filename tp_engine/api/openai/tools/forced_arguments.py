"""How the arguments of forced calls are written, as rules of a grammar: JSON, values between marks, or literals.

``ArgumentForm`` is one of these ways.  Only JSON can follow every schema, so each form says whether it fits one; if it
does not, the whole answer is JSON (``forced.py``).  In other forms arguments come in the order of the schema.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tp_engine.grammar.library import inner_schema
from tp_engine.grammar.schema import NOTES, is_any, without_notes
from tp_engine.grammar.schema_types import SchemaRoot
from tp_engine.requests.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.token_writing import TokenWriting

_Schema = Mapping[str, Any]
# Keywords of objects that these forms can follow.
_OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_KEY = re.compile(r"[^\W\d][\w.\-]*")
_ANY: tuple[_Schema, ...] = tuple({"type": kind} for kind in ("string", "number", "boolean", "null"))
_ANY_TEXT = "/(?s:.*)/"
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NOTHING = '""'
# Words in the text of a form, and the terminals that they stand for.
WORDS = {"NUMBER": "/[0-9]{1,4}/", "IDENTIFIER": "/[A-Za-z0-9]{9}/", "TENCHARS": "/[a-z0-9]{10}/"}
_MAX_DEPTH, _MAX_LENGTH, _MAX_CHOICES = 16, 4096, 1000
_MAX_CHOICE_CHARACTERS = 1 << 16


class UnfitError(Exception):
    """A form cannot follow a schema."""


class ArgumentForm(ABC):
    """One way to write arguments."""

    def fits(self, schema: _Schema) -> bool:
        """Whether this form can follow ``schema``, which is for objects."""
        try:
            self.write("arguments", schema, FormWriting((), None, StructuredOutputsParams(json_object=True)))
        except UnfitError:
            return False
        return True

    @abstractmethod
    def write(self, rule: str, schema: _Schema, writing: FormWriting) -> None:
        """Write ``rule``, and those that it needs, for arguments that follow ``schema``.  Raises ``UnfitError`` if it
        does not fit."""

    @abstractmethod
    def written(self, arguments: Mapping[str, Any]) -> str:
        """Arguments as a model writes them."""


class PlacedRoot(SchemaRoot):
    """The schema of a tool, the ``number``th of a writing, with its ``definitions``."""

    def __init__(self, schema: _Schema, number: int) -> None:
        super().__init__(schema)
        self.definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        self.number = number

    def key(self, text: str) -> str:
        """A key that differs from other tools', whose definitions may differ, for rules of the schema ``text``."""
        return str(self.number) if '"$ref"' in text else ""


@dataclass(slots=True)
class FormWriting:
    """The ``rules`` of a form, in Lark: ``marks`` may be special ``tokens``; JSON has white space as in ``like``.

    Values that are alike share one rule.
    """

    marks: tuple[str, ...]
    tokens: TokenWriting | None
    like: StructuredOutputsParams
    rules: list[str] = field(default_factory=list)
    _names: dict[tuple[str, ...], str] = field(default_factory=dict)
    _num_roots: int = 0
    _num_characters: int = 0

    def root(self, schema: _Schema) -> PlacedRoot:
        """``schema`` as that of the next tool."""
        self._num_roots += 1
        return PlacedRoot(schema, self._num_roots)

    def add(self, rule: str, *ways: str) -> None:
        """Add the rule of this name: one of ``ways``.

        Raises ``UnfitError`` if the grammar gets too long: definitions are repeated in each rule that refers to one.
        """
        self.rules.append(f"{rule}: {' | '.join(ways)}")
        self._num_characters += len(self.rules[-1])
        if self._num_characters > MAX_CONSTRAINT_CHARACTERS:
            raise UnfitError

    def text(self, text: str, name: str = "") -> str:
        """``text``, in which NAME is ``name``, and each of ``WORDS`` a terminal."""
        if self.tokens is None:
            return _NOTHING
        pieces = "|".join(map(re.escape, (*sorted(self.marks, key=len, reverse=True), *WORDS)))
        parts = filter(None, re.split(f"({pieces})", text))
        written = (part if part in WORDS else self.tokens.mark(part.replace("NAME", name)) for part in parts)
        return " ".join(written) or _NOTHING

    def json(self, schema: Any, root: PlacedRoot) -> str:
        """The name of a rule: JSON that follows ``schema``, a part of ``root``."""
        found = {"enum": []} if schema is False else {} if schema is True else without_notes(schema)
        key = json.dumps(found)
        whole = {**root.definitions, **found} if '"$ref"' in key else found
        return self.shared(
            ("json", key, root.key(key)), lambda name: self.add(name, f"%json {inner_schema(whole, self.like)}")
        )

    def until(self, text: str, end: str, stops: Sequence[str] = ()) -> str:
        """The name of a rule: a text that matches the expression ``text``, followed by ``end``.

        The text has none of ``stops``.
        """
        return self.shared(("text", text, end, *stops), lambda name: self._add_until(name, text, end, stops))

    def shared(self, key: tuple[str, ...], add: Callable[[str], None]) -> str:
        """The name of the rule that ``key`` stands for; ``add`` adds the rule of a new name."""
        if key not in self._names:
            name = self._names[key] = f"value_{len(self._names)}"
            add(name)
        return self._names[key]

    def _add_until(self, name: str, text: str, end: str, stops: Sequence[str]) -> None:
        if self.tokens is not None and any(self.tokens.is_one_token(mark) for mark in self.marks if mark in end):
            self.add(name, f"{text} {self.text(end.lstrip())}")  # no text can have a special token
            return
        others = "|".join(re.escape(mark).replace("/", r"\/") for mark in stops)
        without = f" & ~/(?s:.*)({others})(?s:.*)/" if others else ""
        self.add(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]", name.upper())
        self.add(name.upper(), f"{text}{without}")


class JsonArguments(ArgumentForm):
    """A JSON object."""

    def fits(self, schema: _Schema) -> bool:
        return True

    def write(self, rule: str, schema: _Schema, writing: FormWriting) -> None:
        writing.add(rule, f"%json {inner_schema(schema, writing.like)}")

    def written(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)


JSON = JsonArguments()


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedArguments(ArgumentForm):
    """A value between marks for each argument.

    ``argument`` contains the words KEY, VALUE, and IS_TEXT, which is ``true`` if the value is text and ``false`` if it
    is JSON.
    """

    argument: str

    def write(self, rule: str, schema: _Schema, writing: FormWriting) -> None:
        found, root = _properties(schema), writing.root(schema)
        if not found and schema.get("additionalProperties") is not False:
            writing.add(rule, f"{rule}_any*")
            self._add_argument(f"{rule}_any", _ANY_KEY, True, root, writing)
            return
        parts = [f"{rule}_{number}{'' if one.is_required else '?'}" for number, one in enumerate(found)]
        writing.add(rule, " ".join(parts) or _NOTHING)
        for number, one in enumerate(found):
            self._add_argument(f"{rule}_{number}", f'"{one.name}"', one.schema, root, writing)

    def written(self, arguments: Mapping[str, Any]) -> str:
        texts = []
        for key, value in arguments.items():
            before, end = self._around(is_text=isinstance(value, str))
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            texts.append(f"{before.replace('KEY', key)}{text}{end}")
        return "".join(texts)

    def _around(self, *, is_text: bool) -> tuple[str, str]:
        """What precedes and follows a value."""
        before, _, end = self.argument.replace("IS_TEXT", str(is_text).lower()).partition("VALUE")
        return before, end

    def _add_argument(self, rule: str, key: str, schema: Any, root: PlacedRoot, writing: FormWriting) -> None:
        ways = []
        text, other = _text_and_other(schema, root)
        for is_text, value in ((True, text), (False, other)):
            if value is not None:
                before, end = self._around(is_text=is_text)
                opening, _, behind = before.partition("KEY")
                written = (
                    writing.until(value, end, writing.marks)
                    if is_text
                    else f"{writing.json(value, root)} {writing.text(end)}"
                )
                ways.append(f"{writing.text(opening)} {key} {writing.text(behind)} {written}")
        writing.add(rule, *ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralArguments(ArgumentForm):
    """Keys and values as in a program: ``city="Paris", n=1``.

    With its own ``quote``, which surrounds every text, a language also has its own lists and objects; without one,
    these and texts are JSON, which Python reads.
    """

    equals: str
    between: str
    quote: str = ""

    def write(self, rule: str, schema: _Schema, writing: FormWriting) -> None:
        writing.add(rule, self._pairs(rule, schema, writing.root(schema), writing, 0))

    def written(self, arguments: Mapping[str, Any]) -> str:
        return self.between.join(f"{key}{self.equals}{self._literal(value)}" for key, value in arguments.items())

    def _literal(self, value: Any) -> str:
        if not self.quote:
            return repr(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            return f"[{','.join(map(self._literal, value))}]"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self._literal(one)}' for key, one in value.items())}}}"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def _pairs(self, rule: str, schema: _Schema, root: PlacedRoot, writing: FormWriting, depth: int) -> str:
        """The pairs of an object, with what is between them; ``depth`` objects and lists are around it."""
        found = _properties(schema)
        equals, between = json.dumps(self.equals), json.dumps(self.between)
        if not found and schema.get("additionalProperties") is not False:
            pair = f"{_ANY_KEY} {equals} {self._value(True, root, writing, depth)}"
            return f"({pair} ({between} {pair})*)?"
        # s: no pair has come yet; m: one has
        for number, one in enumerate(found):
            value = self._value(one.schema, root, writing, depth)
            writing.add(f"{rule}_p{number}", f'"{one.name}" {equals} {value}')
            for state, mark in (("s", ""), ("m", between)):
                without = [] if one.is_required else [f"{rule}_{state}{number + 1}"]
                writing.add(f"{rule}_{state}{number}", f"{mark} {rule}_p{number} {rule}_m{number + 1}", *without)
        for state in "sm":
            writing.add(f"{rule}_{state}{len(found)}", _NOTHING)
        return f"{rule}_s0"

    def _value(self, schema: Any, root: PlacedRoot, writing: FormWriting, depth: int) -> str:
        """The name of the rule of a value; values that are alike share it, unless they refer to other parts."""
        key = json.dumps(schema) if not isinstance(schema, Mapping) else json.dumps(without_notes(schema))
        if depth > _MAX_DEPTH or (not self.quote and _REFERENCE.search(key)):
            raise UnfitError

        def add(rule: str) -> None:
            try:
                branches = _branches(schema, root) if self.quote or not is_any(schema) else [schema]
            except UnfitError:
                if self.quote:
                    raise
                branches = [schema]
            ways = [self._branch(f"{rule}_v{number}", one, root, writing, depth) for number, one in enumerate(branches)]
            writing.add(rule, *ways)

        return writing.shared(("value", key, root.key(key)), add)

    def _branch(self, rule: str, schema: Any, root: PlacedRoot, writing: FormWriting, depth: int) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if not self.quote and kind in ("boolean", "null") and not schema.keys() & {"enum", "const"}:
            return '"None"' if kind == "null" else '("True" | "False")'
        if not self.quote or kind not in ("string", "array", "object"):
            return writing.json(schema, root)
        if kind == "string":
            return f"{writing.text(self.quote)} {writing.until(_text(schema), self.quote)}"
        if kind == "object":
            return f'"{{" {self._pairs(rule, schema, root, writing, depth + 1)} "}}"'
        if not schema.keys() <= NOTES | {"type", "items", "minItems"} or schema.get("minItems", 0) not in (0, 1):
            raise UnfitError
        item = self._value(schema.get("items", True), root, writing, depth + 1)
        items = f'{item} ("," {item})*'
        return f'"[" {items if schema.get("minItems") else f"({items})?"} "]"'


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    schema: Any
    is_required: bool


def _properties(schema: _Schema) -> list[_Property]:
    """The properties of an object.  ``UnfitError`` for other conditions, and for names that are not identifiers."""
    given, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _OF_OBJECTS or not isinstance(given, Mapping) or not isinstance(required, list):
        raise UnfitError
    if not all(isinstance(name, str) and _KEY.fullmatch(name) for name in (*given, *required)):
        raise UnfitError
    named, needed = {**given, **{name: True for name in required if name not in given}}, set(required)
    return [_Property(name, one, name in needed) for name, one in named.items() if one is not False]


def _text_and_other(schema: Any, root: PlacedRoot) -> tuple[str | None, Any]:
    """How a value is written between marks: as a text of this expression, or as JSON of this schema; None if not so.

    Raises ``UnfitError`` if the format's reader could confuse the two.
    """
    if is_any(schema):
        return _ANY_TEXT, None
    branches = _branches(schema, root)
    if _REFERENCE.search(json.dumps(schema)) or any("type" not in one for one in branches):
        raise UnfitError
    texts = [_text(one) for one in branches if one["type"] == "string"]
    others = {one["type"] for one in branches} - {"string"}
    if not texts:
        return None, schema
    if others - {"null"}:
        raise UnfitError
    return f"({' | '.join(texts)})", {"type": "null"} if others else None


def _branches(schema: Any, root: PlacedRoot) -> list[_Schema]:
    """Schemas of one type each, of which a value follows one.  Raises ``UnfitError`` if that is not clear."""
    found: list[_Schema] = []
    open_ones = [(schema, 0)]
    while open_ones:
        one, depth = open_ones.pop()
        if is_any(one) and not depth:
            return list(_ANY)
        if is_any(one) or not isinstance(one, Mapping) or depth > _MAX_DEPTH or len(found) > _MAX_CHOICES:
            raise UnfitError
        kinds, inner = one.get("type"), one.keys() - NOTES
        values = one.get("enum") if "const" not in one else [one["const"]]
        if inner == {"$ref"}:
            open_ones.append((root.referenced(str(one["$ref"])), depth + 1))
        elif len(inner) == 1 and inner <= {"anyOf", "oneOf", "allOf"}:
            several = one[next(iter(inner))]
            most = 1 if inner == {"allOf"} else _MAX_CHOICES
            if not isinstance(several, list) or not 0 < len(several) <= most:
                raise UnfitError
            open_ones += [(branch, depth + 1) for branch in reversed(several)]
        elif isinstance(kinds, str):
            found.append(one)
        elif isinstance(kinds, list) and kinds and values is None:
            found += [{**one, "type": kind} for kind in kinds]
        elif kinds is None and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            found.append({**one, "type": "string"})
        else:
            raise UnfitError
    return found


def _text(schema: _Schema) -> str:
    """The expression, in Lark, of a text that follows ``schema``.  ``UnfitError`` for conditions that it cannot
    have."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not schema.keys() <= _OF_TEXTS:
        raise UnfitError
    if values is not None:
        texts = values if isinstance(values, list) else []
        if not 0 < len(texts) <= _MAX_CHOICES or not all(isinstance(one, str) for one in texts):
            raise UnfitError
        if sum(map(len, texts)) > _MAX_CHOICE_CHARACTERS:  # written once for each argument that refers to them
            raise UnfitError
        return f"({' | '.join(json.dumps(one, ensure_ascii=False) for one in texts)})"
    if type(least) is not int or type(most) not in (int, type(None)) or max(least, most or 0) > _MAX_LENGTH:
        raise UnfitError
    return f"/(?s:.{{{least},{'' if most is None else most}}})/" if least or most is not None else _ANY_TEXT
