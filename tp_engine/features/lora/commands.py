"""What an operator does with adapters, and what rank 0's engine does with those of the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tp_engine.config import EngineConfig
from tp_engine.engine.admin import EngineAdmin
from tp_engine.engine.feature import EngineFeature
from tp_engine.errors import ConfigError, RequestError
from tp_engine.features.lora.feature import AdapterSlots
from tp_engine.features.lora.scheduling import LoRASlots


def open_adapters(config: EngineConfig) -> AdaptersOfEngine | None:
    """Make the engine's half if adapters are served."""
    return AdaptersOfEngine(config) if config.enable_lora else None


class AdaptersOfEngine(EngineFeature):
    """Loads the adapters of ``lora_modules`` at the start."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_loras, self._modules = config.max_loras, config.lora_modules

    def limits(self) -> AdapterSlots:
        return AdapterSlots(max_loras=self._max_loras)

    def started(self, operator: EngineAdmin) -> None:
        for source in self._modules:
            try:
                load_lora_adapter(operator, source.name, source.path)
            except RequestError as error:
                raise ConfigError(f"lora_modules has {source.name}={source.path}: {error}") from error

    def close(self) -> None:
        pass


def load_lora_adapter(engine: EngineAdmin, name: str, path: str, *, replaces: bool = False) -> dict[str, Any]:
    """Load the adapter in the folder ``path`` under ``name``; with ``replaces``, in place of one that has the name.
    Earlier requests keep what they had.  Returns the ``num_bytes`` that rank 0 keeps of it on the host."""
    adapters = _adapters(engine)
    if name in adapters and not replaces:
        raise RequestError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            param="lora_name",
        )
    generation = adapters.new_generation()
    result = engine.order("load_lora_adapter", {"path": path, "generation": generation})
    adapters.add(name, generation)
    return result


def unload_lora_adapter(engine: EngineAdmin, name: str) -> dict[str, Any]:
    """Forget the adapter ``name``; requests that have it finish with it."""
    adapters = _adapters(engine)
    adapters.check_loaded(name)
    adapters.retire(name)
    return {}


def _adapters(engine: EngineAdmin) -> LoRASlots:
    adapters = engine.feature(LoRASlots)
    if adapters is None:
        raise RequestError("this engine takes no adapters; start it with --enable-lora")
    return adapters


def commands() -> dict[str, Callable[..., dict[str, Any]]]:
    """Return the commands by name."""
    return {act.__name__: act for act in (load_lora_adapter, unload_lora_adapter)}
