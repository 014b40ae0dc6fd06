"""How the arguments of forced calls are written, as rules of a grammar: JSON, values between marks, or literals.

``ArgumentForm`` is one of these ways.  Only JSON can keep every schema, so each form tells whether it fits one; where
it does not, the whole answer is JSON (``forced.py``).  In other forms arguments come in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tp_engine.grammar.library import inner_schema
from tp_engine.grammar.schema import NOTES, is_any, without_notes
from tp_engine.grammar.schema_types import referenced

if TYPE_CHECKING:
    from tp_engine.api.openai.structured import TokenWriting
    from tp_engine.structured_outputs import StructuredOutputsParams

_Schema = Mapping[str, Any]
# Keywords that these forms keep in an object.
_OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_KEY = re.compile(r"[^\W\d][\w.\-]*")
_ANY: tuple[_Schema, ...] = tuple({"type": kind} for kind in ("string", "number", "boolean", "null"))
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NOTHING = '""'
# Words in the text of a form, and the terminals that they stand for.
WORDS = {"NUMBER": "/[0-9]{1,4}/", "IDENTIFIER": "/[A-Za-z0-9]{9}/"}
_MAX_DEPTH, _MAX_LENGTH, _MAX_CHOICES = 16, 4096, 1000


class ArgumentForm(Protocol):
    """One way to write arguments."""

    def fits(self, schema: _Schema) -> bool:
        """Return whether this form can keep ``schema``, which is one of objects."""

    def rules(self, rule: str, schema: _Schema, writing: FormWriting) -> list[str]:
        """Return rules in Lark, the first of which is ``rule``, of arguments that follow ``schema``."""

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as a model writes them."""


@dataclass(frozen=True, slots=True)
class FormWriting:
    """How a form's texts are written: ``marks`` may be special tokens; JSON has white space as in ``like``.

    Values that are alike share one rule; ``rules`` are all of these.
    """

    marks: tuple[str, ...]
    tokens: TokenWriting
    like: StructuredOutputsParams
    rules: list[str] = field(default_factory=list)
    _names: dict[tuple[str, ...], str] = field(default_factory=dict)

    def text(self, text: str, name: str = "") -> str:
        """Return ``text``, in which NAME is ``name``, and each of ``WORDS`` a terminal."""
        pieces = "|".join(map(re.escape, (*sorted(self.marks, key=len, reverse=True), *WORDS)))
        parts = filter(None, re.split(f"({pieces})", text))
        written = (part if part in WORDS else self.tokens.mark(part.replace("NAME", name)) for part in parts)
        return " ".join(written) or _NOTHING

    def json(self, schema: Any, root: _Schema) -> str:
        """Return the name of a rule: JSON that follows ``schema``, a part of ``root``."""
        found = {"enum": []} if schema is False else {} if schema is True else without_notes(schema)
        if '"$ref"' in json.dumps(found):
            found = {**{name: root[name] for name in _DEFINITIONS if name in root}, **found}
        return self.shared(
            ("json", json.dumps(found)), lambda name: [f"{name}: %json {inner_schema(found, self.like)}"]
        )

    def until(self, text: str, end: str, stops: Sequence[str] = ()) -> str:
        """Return the name of a rule: a text that matches the expression ``text``, and ``end`` behind it.

        The text has none of ``stops``.
        """
        return self.shared(("text", text, end, *stops), lambda name: self._until(name, text, end, stops))

    def shared(self, key: tuple[str, ...], made: Callable[[str], list[str]]) -> str:
        """Return the name of the rule that ``key`` stands for; ``made`` gives the rule with a new name, and others."""
        if key not in self._names:
            name = self._names[key] = f"value_{len(self._names)}"
            self.rules.extend(made(name))
        return self._names[key]

    def _until(self, name: str, text: str, end: str, stops: Sequence[str]) -> list[str]:
        if any(self.tokens.is_special(mark) for mark in self.marks if mark in end):  # which no text can have
            return [f"{name}: {text} {self.text(end.lstrip())}"]
        others = "|".join(re.escape(mark).replace("/", r"\/") for mark in stops)
        without = f" & ~/(?s:.*)({others})(?s:.*)/" if others else ""
        suffix = json.dumps(end, ensure_ascii=False)
        return [f"{name}[suffix={suffix}]: {name.upper()}", f"{name.upper()}: {text}{without}"]


class JsonArguments(ArgumentForm):
    """A JSON object."""

    def fits(self, schema: _Schema) -> bool:
        return True

    def rules(self, rule: str, schema: _Schema, writing: FormWriting) -> list[str]:
        return [f"{rule}: %json {inner_schema(schema, writing.like)}"]

    def written(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)


JSON = JsonArguments()


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedArguments(ArgumentForm):
    """A value between marks for each argument.

    In ``argument`` stand the words KEY, VALUE, and IS_TEXT for ``true`` if the value is text and ``false`` if it is
    JSON.
    """

    argument: str

    def fits(self, schema: _Schema) -> bool:
        found = _properties(schema)
        return found is not None and all(_kind(one.schema, schema) is not None for one in found)

    def rules(self, rule: str, schema: _Schema, writing: FormWriting) -> list[str]:
        found = _properties(schema)
        assert found is not None, "it fits"
        if not found and schema.get("additionalProperties") is not False:
            return [f"{rule}: {rule}_any*", self._argument(f"{rule}_any", _ANY_KEY, _FREE, schema, writing)]
        parts = [f"{rule}_{number}{'' if one.is_required else '?'}" for number, one in enumerate(found)]
        made = [f"{rule}: {' '.join(parts) or _NOTHING}"]
        for number, one in enumerate(found):
            kind = _kind(one.schema, schema)
            assert kind is not None, "it fits"
            made.append(self._argument(f"{rule}_{number}", f'"{one.name}"', kind, schema, writing))
        return made

    def written(self, arguments: Mapping[str, Any]) -> str:
        texts = []
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            before, _, end = self.argument.replace("IS_TEXT", str(is_text).lower()).partition("VALUE")
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            texts.append(f"{before.replace('KEY', key)}{text}{end}")
        return "".join(texts)

    def _argument(self, rule: str, key: str, kind: _ValueForm, root: _Schema, writing: FormWriting) -> str:
        ways = []
        for is_text in (True, False):
            if (kind.text is None) if is_text else (kind.json is None):
                continue
            before, _, end = self.argument.replace("IS_TEXT", str(is_text).lower()).partition("VALUE")
            opening, _, behind = before.partition("KEY")
            start = f"{writing.text(opening)} {key} {writing.text(behind)}"
            if is_text:
                ways.append(f"{start} {writing.until(str(kind.text), end, writing.marks)}")
            else:
                ways.append(f"{start} {writing.json(kind.json, root)} {writing.text(end)}")
        return f"{rule}: {' | '.join(ways)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralArguments(ArgumentForm):
    """Keys and values as in a program: ``city="Paris", n=1``.

    With a ``quote`` of its own, which stands on both sides of every text, a language has its own lists and objects too;
    without one, these and texts are JSON, which Python reads.
    """

    equals: str
    between: str
    quote: str = ""

    def fits(self, schema: _Schema) -> bool:
        found = _properties(schema)
        seen: set[int] = set()
        return found is not None and all(self._fits(one.schema, schema, seen, 0) for one in found)

    def rules(self, rule: str, schema: _Schema, writing: FormWriting) -> list[str]:
        return _LiteralRules(self, schema, writing).of_arguments(rule)

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

    def _fits(self, schema: Any, root: _Schema, seen: set[int], depth: int) -> bool:
        """Whether a value can be written; ``seen`` are the schemas that are being looked at, or have been."""
        if not self.quote:
            return _REFERENCE.search(json.dumps(schema)) is None
        if id(schema) in seen:
            return True
        seen.add(id(schema))
        branches = _branches(schema, root)
        if branches is None or depth > _MAX_DEPTH:
            return False
        return all(self._keeps(one, root, seen, depth) for one in branches)

    def _keeps(self, schema: _Schema, root: _Schema, seen: set[int], depth: int) -> bool:
        match schema.get("type"):
            case "string":
                return _text(schema) is not None
            case "object":
                found = _properties(schema)
                return found is not None and all(self._fits(one.schema, root, seen, depth + 1) for one in found)
            case "array":
                is_plain = schema.keys() <= NOTES | {"type", "items", "minItems"}
                is_any = not isinstance(schema.get("minItems", 0), int) or schema.get("minItems", 0) > 1
                return is_plain and not is_any and self._fits(schema.get("items", True), root, seen, depth + 1)
        return True


class _LiteralRules:
    """Makes the rules of one call's arguments."""

    def __init__(self, form: LiteralArguments, root: _Schema, writing: FormWriting) -> None:
        self._form, self._root, self._writing = form, root, writing
        self._made: list[str] = []

    def of_arguments(self, rule: str) -> list[str]:
        self._made = [""]
        self._made[0] = f"{rule}: {self._pairs(rule, self._root)}"
        return self._made

    def _pairs(self, rule: str, schema: _Schema) -> str:
        """The pairs of an object, with what is between them."""
        found = _properties(schema)
        assert found is not None, "it fits"
        equals, between = json.dumps(self._form.equals), json.dumps(self._form.between)
        if not found and schema.get("additionalProperties") is not False:
            pair = f"{_ANY_KEY} {equals} {self._value(True)}"
            return f"({pair} ({between} {pair})*)?"
        for number, one in enumerate(found):
            value = self._value(one.schema)
            self._made.append(f'{rule}_p{number}: "{one.name}" {equals} {value}')
        # s: no pair has come yet; m: one has
        for number, one in enumerate(found):
            for state, mark in (("s", ""), ("m", between)):
                ways = [f"{mark} {rule}_p{number} {rule}_m{number + 1}"]
                ways += [] if one.is_required else [f"{rule}_{state}{number + 1}"]
                self._made.append(f"{rule}_{state}{number}: {' | '.join(ways)}")
        self._made += [f'{rule}_{state}{len(found)}: ""' for state in "sm"]
        return f"{rule}_s0"

    def _value(self, schema: Any) -> str:
        """Return the name of the rule of a value; values that are alike share it, unless they refer to other parts."""
        key = json.dumps(schema) if not isinstance(schema, Mapping) else json.dumps(without_notes(schema))
        return self._writing.shared(
            ("value", key, str(id(self._root)) if '"$ref"' in key else ""), lambda name: self._of_value(name, schema)
        )

    def _of_value(self, rule: str, schema: Any) -> list[str]:
        is_one = not self._form.quote and is_any(schema)
        branches = [schema] if is_one else _branches(schema, self._root) or [schema]
        before, self._made = self._made, []
        ways = [self._branch(f"{rule}_v{number}", one) for number, one in enumerate(branches)]
        made, self._made = self._made, before
        return [f"{rule}: {' | '.join(ways)}", *made]

    def _branch(self, rule: str, schema: Any) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        quote, is_plain = self._form.quote, isinstance(schema, Mapping) and not schema.keys() & {"enum", "const"}
        if not quote and kind in ("boolean", "null") and is_plain:
            return '"None"' if kind == "null" else '("True" | "False")'
        if not quote or kind not in ("string", "array", "object"):
            return self._writing.json(schema, self._root)
        if kind == "string":
            return f"{self._writing.text(quote)} {self._writing.until(str(_text(schema)), quote)}"
        if kind == "object":
            return f'"{{" {self._pairs(rule, schema)} "}}"'
        item = self._value(schema.get("items", True))
        items = f'{item} ("," {item})*'
        return f'"[" {items if schema.get("minItems") else f"({items})?"} "]"'


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    schema: Any
    is_required: bool


@dataclass(frozen=True, slots=True)
class _ValueForm:
    """How a value is written between marks: as a text that matches an expression, as JSON, or as either."""

    text: str | None
    json: Any = None


_FREE = _ValueForm("/(?s:.*)/")


def _properties(schema: _Schema) -> list[_Property] | None:
    """The properties of an object; None for a schema that has other conditions, or names that are no words."""
    given, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _OF_OBJECTS or not isinstance(given, Mapping) or not isinstance(required, list):
        return None
    if not all(isinstance(name, str) and _KEY.fullmatch(name) for name in (*given, *required)):
        return None
    named = {**given, **{name: True for name in required if name not in given}}
    return [_Property(name, one, name in required) for name, one in named.items() if one is not False]


def _kind(schema: Any, root: _Schema) -> _ValueForm | None:
    """How a value of ``schema`` is written between marks; None if the format's reader could take it for another."""
    if is_any(schema):
        return _FREE
    if _REFERENCE.search(json.dumps(schema)):
        return None
    branches = _branches(schema, root)
    if branches is None or any("type" not in one for one in branches):
        return None
    texts = [_text(one) for one in branches if one["type"] == "string"]
    others = [one for one in branches if one["type"] != "string"]
    if not texts:
        return _ValueForm(None, schema)
    if None in texts or any(one["type"] != "null" for one in others):
        return None
    return _ValueForm(f"({' | '.join(map(str, texts))})", {"type": "null"} if others else None)


def _branches(schema: Any, root: _Schema) -> list[_Schema] | None:
    """Schemas of one type each, of which a value follows one; None if that can not be told."""
    found: list[_Schema] = []
    open_ones = [(schema, 0)]
    while open_ones:
        one, depth = open_ones.pop()
        if is_any(one):
            return None if depth else list(_ANY)
        if not isinstance(one, Mapping) or depth > _MAX_DEPTH or len(found) > _MAX_CHOICES:
            return None
        kinds, inner = one.get("type"), one.keys() - NOTES
        values = one.get("enum") if "const" not in one else [one["const"]]
        if inner == {"$ref"}:
            open_ones.append((referenced(root, str(one["$ref"])), depth + 1))
        elif len(inner) == 1 and inner <= {"anyOf", "oneOf", "allOf"}:
            several = one[next(iter(inner))]
            if not isinstance(several, list) or not several or (inner == {"allOf"} and len(several) > 1):
                return None
            open_ones += [(branch, depth + 1) for branch in reversed(several)]
        elif isinstance(kinds, str):
            found.append(one)
        elif isinstance(kinds, list) and kinds and values is None:
            found += [{**one, "type": kind} for kind in kinds]
        elif kinds is None and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            found.append({**one, "type": "string"})
        else:
            return None
    return found


def _text(schema: _Schema) -> str | None:
    """The expression, in Lark, of a text that follows ``schema``; None for conditions that it can not have."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not schema.keys() <= _OF_TEXTS:
        return None
    if values is not None:
        texts = values if isinstance(values, list) else []
        if not 0 < len(texts) <= _MAX_CHOICES or not all(isinstance(one, str) for one in texts):
            return None
        return f"({' | '.join(json.dumps(one, ensure_ascii=False) for one in texts)})"
    if type(least) is not int or type(most) not in (int, type(None)) or max(least, most or 0) > _MAX_LENGTH:
        return None
    return f"/(?s:.{{{least},{'' if most is None else most}}})/" if least or most is not None else "/(?s:.*)/"
