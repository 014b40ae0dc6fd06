"""The architectures that the engine runs: one file per family, found automatically.  No torch.

A file lists the ``ARCHITECTURES`` of config.json that it describes, and its ``read`` turns the configuration into a
``ModelSpec``.  docs/models.md tells how to add one.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.heads import HEADS, decoder_config, decoder_of, with_classifier
from tp_engine.model_config.spec import ModelSpec


@cache
def families() -> dict[str, Callable[[ConfigJson], ModelSpec]]:
    """Return the reader of each architecture, by its name in config.json."""
    readers: dict[str, Callable[[ConfigJson], ModelSpec]] = {}
    for found in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{found}")
        readers |= dict.fromkeys(module.ARCHITECTURES, module.read)
    return readers


def read_spec(config: ConfigJson) -> ModelSpec:
    """Return the model that ``config`` describes: a decoder, or one with the head of a classifier.

    Raises ``ConfigError`` if the engine does not run its architecture.
    """
    name = config.architecture
    reader = families().get(name)
    if name.endswith("Model") and (whole := f"{name.removesuffix('Model')}ForCausalLM") in families():
        return families()[whole](config.changed({"architectures": [whole]}))  # saved without its output head
    if reader is None and (decoder := decoder_of(config, families())) is not None:
        return with_classifier(families()[decoder](decoder_config(config, decoder)), config)
    if reader is None:
        nearest = difflib.get_close_matches(name, families(), n=1)
        hint = f", of which {nearest[0]} has the nearest name" if nearest else ""
        raise ConfigError(
            f"config.json: architectures is {shown([name])}; this engine runs exactly one of "
            f"{', '.join(families())}{hint}. Classifiers on them end in {', '.join(HEADS)}"
        )
    return reader(config)
