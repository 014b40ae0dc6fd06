"""How many images a prompt may have: the option ``limit_mm_per_prompt``.  No torch, no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.options.fields import json_object

CONFIG_NAME = "limit_mm_per_prompt"
_DEFAULT = 32
_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """A prompt has at most ``image`` images; with 0 the model's text part is served alone."""

    image: int = _DEFAULT

    def __post_init__(self) -> None:
        if type(self.image) is not int or not 0 <= self.image <= _MOST:
            raise ConfigError(
                f"{CONFIG_NAME} has image {shown(self.image)}; it must be a whole number from 0 (no image) to {_MOST}"
            )

    @classmethod
    def of(cls, given: PromptImages | Mapping[str, Any] | str) -> PromptImages:
        """Return the record of the option's JSON object, in which vLLM also takes sizes, and numbers of what no model
        here reads.  Raises ``ConfigError``."""
        if isinstance(given, PromptImages):
            return given
        number = json_object(CONFIG_NAME, given, ("image", "video", "audio")).get("image", _DEFAULT)
        return cls(image=number.get("count", _DEFAULT) if isinstance(number, dict) else number)
