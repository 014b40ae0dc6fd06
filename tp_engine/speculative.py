"""Speculation: the option ``speculative_config``, with vLLM's names."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError

CONFIG_NAME = "speculative_config"
METHODS = ("ngram",)
_MOST_TOKENS = 16
_SHORTEST, _LONGEST = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens are guessed.

    ``ngram``: the last ``prompt_lookup_max`` tokens, or fewer down to ``prompt_lookup_min``, are looked up in the
    request's own prompt and answer; what followed them there is the guess, of up to ``num_speculative_tokens``.

    A step has at most ``max_step_rows`` decodes, guesses included; where more requests decode, none are guessed.

    Raises ``ConfigError`` for what can not be.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = _SHORTEST
    prompt_lookup_max: int = _LONGEST
    max_step_rows: int = 24

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"{CONFIG_NAME} has the method {self.method!r}; choose one of {', '.join(METHODS)}")
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name != "method" and (type(value) is not int or value < 1):
                raise ConfigError(f"{CONFIG_NAME} has {spec.name} {value!r}; it must be an integer, at least 1")
        if self.num_speculative_tokens > _MOST_TOKENS:
            raise ConfigError(
                f"{CONFIG_NAME} has num_speculative_tokens {self.num_speculative_tokens}; at most {_MOST_TOKENS} pay"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{CONFIG_NAME} has prompt_lookup_min {self.prompt_lookup_min} above prompt_lookup_max "
                f"{self.prompt_lookup_max}; lower the first or raise the second"
            )
        if self.max_step_rows < 2:
            raise ConfigError(f"{CONFIG_NAME} has max_step_rows 1, which leaves no room for a guess; set at least 2")

    @classmethod
    def of(cls, text: str | None) -> SpeculativeConfig | None:
        """Parse the option's JSON text; None is no speculation.  Raises ``ConfigError``.

        If only one of ``prompt_lookup_min`` and ``prompt_lookup_max`` is given, the other one follows it where its
        default does not fit.
        """
        if text is None:
            return None
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{CONFIG_NAME} is {text!r}, which is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(
                f'{CONFIG_NAME} is {text!r}; it must be a JSON object, such as {{"method":"ngram",'
                '"num_speculative_tokens":4}'
            )
        known = [spec.name for spec in dataclasses.fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ConfigError(f"{CONFIG_NAME} names {unknown[0]!r}; it can set {', '.join(known)}")
        values = {name: given[name] for name in known if given.get(name) is not None}
        shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if longest is None and type(shortest) is int:
            values["prompt_lookup_max"] = max(shortest, _LONGEST)
        if shortest is None and type(longest) is int:
            values["prompt_lookup_min"] = min(longest, _SHORTEST)
        return cls(**values)
