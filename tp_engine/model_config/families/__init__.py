"""The architectures that the engine runs: one file per family, found automatically.  No torch.

A file lists the ``ARCHITECTURES`` of config.json that it describes, and its ``read`` turns the configuration into a
``ModelSpec``.  docs/models.md tells how to add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.spec import ModelSpec


@cache
def families() -> dict[str, Callable[[ConfigJson], ModelSpec]]:
    """The reader of each architecture, by its name in config.json."""
    readers: dict[str, Callable[[ConfigJson], ModelSpec]] = {}
    for found in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{found}")
        readers |= dict.fromkeys(module.ARCHITECTURES, module.read)
    return readers


def read_spec(config: ConfigJson) -> ModelSpec:
    """The model that ``config`` describes.  Raises ``ConfigError`` if the engine does not run its architecture."""
    names = config.require("architectures", list)
    reader = families().get(names[0]) if len(names) == 1 else None
    if reader is None:
        raise ConfigError(
            f"config.json: architectures is {names!r}; this engine runs exactly one of {', '.join(families())}"
        )
    return reader(config)
