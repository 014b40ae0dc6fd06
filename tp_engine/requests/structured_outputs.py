"""What an output must look like: a JSON schema, a regular expression, a choice of texts or a grammar, and defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tp_engine.errors import ConfigError, RequestError, shown
from tp_engine.options.fields import checked, json_object, key
from tp_engine.options.foreign_rows import refused
from tp_engine.options.intake import takes_names_of_others
from tp_engine.options.params import several, takes_forms
from tp_engine.requests.nesting import is_expression_deeper, is_grammar_deeper, is_schema_deeper

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Real schemas nest up to 40 deep; a chain of 1,000 objects overflows the stack of the grammar library.
MAX_NESTING = 500
MAX_CHOICES = 50_000
MAX_CONSTRAINT_CHARACTERS = 1 << 20
COMPILATION_TIMEOUT_S = 5.0
PARAM = "structured_outputs"
CONFIG_NAME = "structured_outputs_config"


if TYPE_CHECKING:  # what callers may give
    Schema: TypeAlias = str | Mapping[str, Any]
    Choices: TypeAlias = Sequence[str]
else:  # what a record holds, also one that is read from another process
    Schema = str
    Choices = tuple[str, ...]


def _schema_text(schema: object) -> str | None:
    """The JSON text of a schema, which is an object or a boolean."""
    if schema is None:
        return None
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _error(f"the JSON schema cannot be read: {error or 'it is nested too deeply'}") from error
    if not isinstance(parsed, (Mapping, bool)):
        raise _error(f"the JSON schema is {shown(parsed)}; it must be an object")
    return text


def _choices(choices: object) -> tuple[str, ...] | None:
    if choices is None:
        return None
    found = several(choices)
    if not found:
        raise _error(f"choice is {shown(choices)}; it must be a list of at least one text")
    for one in found:
        if not isinstance(one, str) or not one:
            raise _error(f"choice contains {shown(one)}; every choice must be a text of at least one character")
    return found


def _any_object(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value or None
    raise _error(f"json_object is {shown(value)}; it must be true")


@takes_names_of_others(refused("describe the form with json, regex, choice or grammar", "structural_tag"))
@takes_forms
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``, with vLLM's field names.

    ``json`` is a JSON schema, as a mapping or as JSON text (kept as text); ``regex`` describes the whole output;
    ``choice`` lists the possible outputs; ``grammar`` is a context-free grammar in Lark or GBNF (EBNF) syntax;
    ``json_object`` True asks for any JSON object.

    For JSON: ``disable_any_whitespace`` allows no space between tokens, ``whitespace_pattern`` is a regular expression
    for it, and ``disable_additional_properties`` False allows properties that a schema does not name, where it says
    nothing about them; None: as the engine's ``structured_outputs_config`` says.  ``disable_fallback`` is accepted
    because callers send it, and changes nothing: there is one grammar library.

    ``preamble`` says what comes before the answer, such as reasoning: rules in Lark syntax, whose ``start`` ends with
    ``@answer`` and may name ``space``, for white space.

    Raises ``RequestError`` for faults that can be found without the grammar library; the check of a request finds the
    others (``tp_engine.grammar``).
    """

    json: Schema | None = key(None, form=_schema_text)
    regex: str | None = None
    choice: Choices | None = key(None, form=_choices)
    grammar: str | None = None
    json_object: bool | None = key(None, form=_any_object)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    preamble: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise _error(f"{found} of {', '.join(KINDS)} are set; exactly one must be")
        for name in ("json", "regex", "grammar", "whitespace_pattern", "preamble"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            _check_text("choice", "".join(self.choice))
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            kinds = (bool, type(None)) if name == "disable_additional_properties" else bool
            if not isinstance(getattr(self, name), kinds):
                raise _error(f"{name} is {shown(getattr(self, name))}; it must be true or false")

    @property
    def kind(self) -> str:
        """Which of ``KINDS`` is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def check_bounds(self) -> None:
        """Raise ``RequestError`` for a constraint that is too deep or too long for a compiler; takes linear time."""
        if self.choice is not None and len(self.choice) > MAX_CHOICES:
            raise _error(f"choice has {len(self.choice)} texts; at most {MAX_CHOICES} are allowed")
        if self.json is not None and is_schema_deeper(json.loads(str(self.json)), MAX_NESTING):
            raise _too_deep("the JSON schema", "objects, lists and references")
        if self.grammar is not None and is_grammar_deeper(self.grammar, MAX_NESTING):
            raise _too_deep("the grammar", "rules or brackets")
        if self.regex is not None and is_expression_deeper(self.regex, MAX_NESTING):
            raise _too_deep("the regex", "groups")


@checked(CONFIG_NAME)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsDefaults:
    """The engine's ``structured_outputs_config``: defaults for the JSON fields of ``StructuredOutputsParams``, and the
    seconds of processor time that a grammar may take to compile.  Raises ``ConfigError`` for faults that can be found
    without the grammar library."""

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None
    compilation_timeout_s: float = key(COMPILATION_TIMEOUT_S, positive=True, most=600)

    def __post_init__(self) -> None:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ConfigError(f"{CONFIG_NAME} has both disable_any_whitespace and whitespace_pattern; give one of them")
        try:
            self.probe()
        except RequestError as error:
            raise ConfigError(f"{CONFIG_NAME} cannot be used: {error}") from error

    @classmethod
    def of(cls, given: StructuredOutputsDefaults | Mapping[str, Any] | str) -> StructuredOutputsDefaults:
        """The record of the option's JSON object, given as text or as a mapping.  Raises ``ConfigError``."""
        known = [spec.name for spec in dataclasses.fields(cls)]
        return given if isinstance(given, StructuredOutputsDefaults) else cls(**json_object(CONFIG_NAME, given, known))

    def probe(self) -> StructuredOutputsParams:
        """A constraint with all defaults, for a check by the grammar library."""
        return self.complete(StructuredOutputsParams(json_object=True))

    def complete(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """``params`` with these defaults; a request that sets either white space field keeps both of its own."""
        if not self.disable_any_whitespace and self.disable_additional_properties and not self.whitespace_pattern:
            return params  # which means the same
        spaced = params.disable_any_whitespace or params.whitespace_pattern is not None
        return dataclasses.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace if spaced else self.disable_any_whitespace,
            whitespace_pattern=params.whitespace_pattern if spaced else self.whitespace_pattern,
            disable_additional_properties=self.disable_additional_properties
            if params.disable_additional_properties is None
            else params.disable_additional_properties,
        )


def _check_text(name: str, text: object) -> None:
    """Refuse a value that is not text, empty, too long or not valid Unicode; None passes."""
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise _error(f"{name} is {shown(text)}; it must be a text of at least one character")
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise _error(f"{name} has {len(text)} characters; at most {MAX_CONSTRAINT_CHARACTERS} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _error(f"{name} has half a surrogate pair; it must be valid Unicode") from error


def _too_deep(what: str, parts: str) -> RequestError:
    return _error(f"{what} has more than {MAX_NESTING} {parts} within each other; make it flatter")


def _error(message: str) -> RequestError:
    return RequestError(message, param=PARAM)
