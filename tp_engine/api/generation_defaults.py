"""The model's own sampling defaults, from the ``generation_config.json`` beside its weights."""

from __future__ import annotations

import json
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.model_config.source import resolve_model_folder
from tp_engine.sampling_params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_generation_defaults(model: str, revision: str | None = None) -> dict[str, Any]:
    """``SamplingParams`` fields that requests take where they say nothing; empty for a model without the file.

    ``do_sample: false`` is greedy decoding.  Raises ``ConfigError`` for a file that can not be used.
    """
    path = resolve_model_folder(model, revision) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        defaults = {name: written[name] for name in _NAMES if written.get(name) is not None}
        if written.get("do_sample") is False:
            defaults["temperature"] = 0.0
        SamplingParams(**defaults)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} has no usable sampling defaults: {error}") from error
    return defaults
