"""Options on the sampling of requests that leave it open, named as in ``vllm serve``, of server and batch job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tp_engine.config import option
from tp_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingDefaultOptions:
    """Where the defaults of temperature, top_p and the like come from."""

    generation_config: str = option(
        "auto",
        "where sampling defaults come from: auto (generation_config.json beside the weights), vllm (none), or the "
        "folder of such a file",
    )
    override_generation_config: str | None = option(
        None, """JSON object of sampling defaults that go before those, such as '{"temperature": 0.5}'"""
    )

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """``override_generation_config``, read."""
        text = self.override_generation_config
        try:
            overrides = {} if text is None else json.loads(text)
        except ValueError as error:
            raise ConfigError(f"override_generation_config is {text!r}, which is not JSON: {error}") from error
        if not isinstance(overrides, dict):
            raise ConfigError(f"override_generation_config is {text!r}; it must be a JSON object")
        return overrides
