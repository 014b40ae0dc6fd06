"""Sampling defaults for what a request leaves open: the options that choose them, and the file that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.model_config.source import read_json, resolve_model_folder
from tp_engine.options.fields import checked, json_object, option
from tp_engine.requests.sampling_params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"
_FILE = "generation_config.json"


def load_generation_defaults(
    model: str, revision: str | None = None, *, source: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``SamplingParams`` fields for requests that do not set them; empty for a model without the file.

    ``source`` is auto (the model's folder), vllm (no file) or a folder with the file; ``overrides`` take precedence.
    ``do_sample: false`` means greedy decoding; ``max_new_tokens`` becomes ``max_tokens``, which limits all answers.
    Raises ``ConfigError`` for a file or overrides that cannot be used.
    """
    path = None if source == "vllm" else _path(model, revision, source)
    try:
        written = {} if path is None else read_json(path)
        defaults = _defaults(written)
        SamplingParams(**defaults)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} has no usable sampling defaults: {error}") from error
    try:
        defaults |= _defaults(overrides or {})
        SamplingParams(**defaults)
    except ValueError as error:
        raise ConfigError(f"override_generation_config cannot be used: {error}") from error
    return defaults


def _path(model: str, revision: str | None, source: str) -> Path | None:
    if source == "auto":
        path = resolve_model_folder(model, revision) / _FILE
        return path if path.is_file() else None
    path = Path(source) / _FILE
    if not path.is_file():
        raise ConfigError(f"generation_config is {source!r}; it must be auto, vllm, or a folder with a {_FILE}")
    return path


def _defaults(written: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: written[name] for name in _NAMES if written.get(name) is not None}
    if written.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if written.get(_LIMIT) is not None:
        defaults["max_tokens"] = written[_LIMIT]
    return defaults


def _overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    return json_object("override_generation_config", given, (*_NAMES, _LIMIT))


@checked()
@dataclass(frozen=True, kw_only=True)
class SamplingDefaultOptions:
    """Where the defaults of temperature, top_p and the like come from, named as in ``vllm serve``."""

    generation_config: str = option(
        "auto",
        "where sampling defaults come from: auto (generation_config.json beside the weights), vllm (none), or the "
        "folder of such a file",
        section="Sampling defaults",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        """JSON object of sampling defaults that go before those, such as '{"temperature": 0.5}'""",
        json=_overrides,
    )

    def defaults(self, model: str, revision: str | None = None) -> dict[str, Any]:
        """The fields of ``SamplingParams`` for requests that do not set them; raises ``ConfigError``."""
        overrides = self.override_generation_config
        return load_generation_defaults(model, revision, source=self.generation_config, overrides=overrides)

    def params(self, model: str, revision: str | None = None) -> SamplingParams:
        """The parameters of a request that sets none; raises ``ConfigError``."""
        return SamplingParams(**self.defaults(model, revision))
