"""What constraints take where a request says nothing, as the engine's ``structured_outputs_config`` sets it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError, RequestError
from tp_engine.structured_outputs import StructuredOutputsParams

NAME = "structured_outputs_config"
# vLLM's names for choices that do not exist here: there is one library.
_WITHOUT_EFFECT = ("backend", "disable_fallback")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsDefaults:
    """Fields of ``StructuredOutputsParams`` of the same names, for JSON alone.

    Raises ``ConfigError`` for values that can be seen to be wrong without the grammar library.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ConfigError(f"{NAME} has both disable_any_whitespace and whitespace_pattern; give one of them")
        try:
            self.probe()
        except RequestError as error:
            raise ConfigError(f"{NAME} can not be used: {error}") from error

    @classmethod
    def of(cls, text: str | None) -> StructuredOutputsDefaults:
        """From the option's JSON text; None sets nothing.  Raises ``ConfigError``."""
        try:
            given: Any = {} if text is None else json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{NAME} is {text!r}, which is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"{NAME} is {text!r}; it must be a JSON object")
        known = [spec.name for spec in dataclasses.fields(cls)]
        if unknown := sorted(given.keys() - {*known, *_WITHOUT_EFFECT}):
            raise ConfigError(f"{NAME} names {unknown[0]!r}; it can set {', '.join(known)}")
        return cls(**{name: given[name] for name in known if given.get(name) is not None})

    def probe(self) -> StructuredOutputsParams:
        """A constraint with all that is set, to be checked by the grammar library."""
        return StructuredOutputsParams(json_object=True, **dataclasses.asdict(self))

    def complete(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """``params`` with these defaults; a request's own white space goes before both of theirs."""
        spaced = params.disable_any_whitespace or params.whitespace_pattern is not None
        return dataclasses.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace if spaced else self.disable_any_whitespace,
            whitespace_pattern=params.whitespace_pattern if spaced else self.whitespace_pattern,
            disable_additional_properties=params.disable_additional_properties or self.disable_additional_properties,
        )
