"""LoRA adapters as options and requests name them, with vLLM's words."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError, RequestError, shown
from tp_engine.options.foreign_rows import accepted
from tp_engine.options.intake import takes_names_of_others


@takes_names_of_others(accepted("has no effect", "base_model_name load_inplace long_lora_max_len"))
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a call of ``LLM.generate`` or ``LLM.chat``: loaded from ``lora_path`` at its first use.
    ``lora_name`` names it from then on.  A call with another path under the same name loads that one in its place.
    ``lora_int_id`` is not used: it is here for calls that are written for vLLM."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def load_for(request: LoRARequest, loaded: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of the load that ``request`` needs; None if its adapter is ``loaded`` (name -> folder).
    ``RequestError`` for a request without a folder whose name is not loaded."""
    known = loaded.get(request.lora_name)
    if known is not None and request.lora_path in ("", known):
        return None
    if not request.lora_path or not request.lora_name:
        raise RequestError(
            f"no adapter is loaded under the name {shown(request.lora_name)}; give a lora_path too",
            param="lora_request",
        )
    return {"name": request.lora_name, "path": request.lora_path, "replaces": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """An adapter's name, and its folder as every host of the engine finds it."""

    name: str
    path: str

    def __post_init__(self) -> None:
        for field, value in (("name", self.name), ("path", self.path)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"the {field} of an adapter is {shown(value)}; give a {field} that is not empty")


def parse_modules(values: Iterable[AdapterSource | Mapping[str, Any] | str]) -> tuple[AdapterSource, ...]:
    """Return the adapters of ``--lora-modules``: each NAME=PATH, or a JSON object with name and path (vLLM's two
    forms), as text or as a mapping.  ``base_model_name`` may be there; it is not used, because there is one base
    model.  Raises ``ConfigError``."""
    found = tuple(map(_parse_module, values))
    names = [one.name for one in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"lora_modules names {repeated!r} twice; give each adapter a name of its own")
    return found


def adapter_names(sources: Iterable[AdapterSource], model_names: Sequence[str]) -> list[str]:
    """Return the names of the adapters of ``--lora-modules``; ``ConfigError`` for one that is among the model's own."""
    names = [source.name for source in sources]
    if taken := next((name for name in names if name in model_names), None):
        raise ConfigError(f"lora_modules has {taken!r}, which names the model itself; give the adapter another name")
    return names


def _parse_module(value: AdapterSource | Mapping[str, Any] | str) -> AdapterSource:
    if isinstance(value, AdapterSource):
        return value
    if isinstance(value, Mapping):
        return _described(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"lora_modules is {shown(value)}; it must be texts, none of them empty")
    if not value.lstrip().startswith("{"):
        name, equals, path = value.partition("=")
        if not equals:
            raise ConfigError(f'lora_modules has {value!r}; write NAME=PATH or {{"name": NAME, "path": PATH}}')
        return AdapterSource(name=name, path=path)
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_modules has {value!r}, which is not JSON: {error}") from error
    return _described(found)


def _described(given: Mapping[str, Any]) -> AdapterSource:
    if unknown := sorted(given.keys() - {"name", "path", "base_model_name"}):
        raise ConfigError(f"lora_modules has {unknown[0]!r}; an adapter has name, path and base_model_name")
    return AdapterSource(name=given.get("name", ""), path=given.get("path", ""))
