"""The architectures that the engine runs: one file per family, found automatically.  No torch.

A file lists the ``ARCHITECTURES`` of config.json that it describes, and its ``read`` turns the configuration into a
``ModelSpec``.  docs/models.md tells how to add one.
"""

import difflib
import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from functools import cache

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.asked_decoder import asked_model
from tp_engine.model_config.asking import ask
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.heads import HEADS, decoder_config, decoder_of, with_classifier
from tp_engine.model_config.installed_classes import has_class, transformers_version
from tp_engine.model_config.spec import ModelSpec

_OF_TEXT, _OF_WHOLE = "ForCausalLM", "ForConditionalGeneration"
_FIRST_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*")  # of an architecture, or of a model type
_LONGEST_NAME, _MOST_RELATIVES = 100, 3


@cache
def families() -> dict[str, Callable[[ConfigJson], ModelSpec]]:
    """Return the reader of each architecture, by its name in config.json."""
    readers: dict[str, Callable[[ConfigJson], ModelSpec]] = {}
    for found in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{found}")
        readers |= dict.fromkeys(module.ARCHITECTURES, module.read)
    return readers


def named(config: ConfigJson) -> ConfigJson:
    """Return ``config`` with an architecture: its own, or the one of its ``model_type``, as in transformers.

    Raises ``ConfigError`` if neither tells one.
    """
    kind = config.peek("model_type")
    if config.peek("architectures") not in (None, []) or not isinstance(kind, str):
        return config
    wanted = kind.lower().replace("_", "")
    names = [name for end in (_OF_WHOLE, _OF_TEXT) for name in families() if name.endswith(end)]
    found = [name for name in names if wanted in _kinds(name)]
    if not found:
        raise _refusal(f"there are no architectures, and model_type is {shown(kind)}", kind)
    return config.changed({"architectures": found[:1]})


def read_spec(config: ConfigJson, model_impl: str = "auto") -> ModelSpec:
    """Return the model that ``config`` describes: a decoder, or one with the head of a classifier.

    A family reads it, or, as ``EngineConfig.model_impl`` says, its class in transformers is asked.

    Raises ``ConfigError`` if the engine does not run its architecture.
    """
    name = config.architecture
    reader = families().get(name)
    if model_impl == "transformers" and not has_class(name):
        raise _refusal(f"model_impl is transformers, which has no causal class {shown(name)}", name)
    if model_impl == "transformers" or (model_impl == "auto" and reader is None and has_class(name)):
        answer = ask(config.values)
        if answer.found is None:
            raise _refusal(
                f"architectures is {shown([name])}, a class of transformers {transformers_version()} that was asked "
                f"what it computes: it is not served, because {answer.problem}",
                name,
            )
        return asked_model(answer.found, config)
    if name.endswith("Model") and (whole := f"{name.removesuffix('Model')}ForCausalLM") in families():
        return families()[whole](config.changed({"architectures": [whole]}))  # saved without its output head
    if reader is None and (decoder := decoder_of(config, families())) is not None:
        return with_classifier(families()[decoder](decoder_config(config, decoder)), config)
    if reader is None:
        raise _refusal(f"architectures is {shown([name])}", name, _not_asked(name))
    return reader(config)


def _kinds(name: str) -> tuple[str, ...]:
    """The model types of an architecture, without underscores: a text part alone has one of its own."""
    stem = _stem(name)
    return (stem, f"{stem}text") if name.endswith(_OF_TEXT) else (stem,)


def _stem(name: str) -> str:
    return name.removesuffix(_OF_TEXT).removesuffix(_OF_WHOLE).lower().replace("_", "")


def _not_asked(name: str) -> str:
    """Why no class of transformers was asked, and what would change that."""
    if has_class(name):
        return f"transformers has a class {name}, which --model-impl auto asks what it computes. "
    if not name.endswith(_OF_TEXT):
        return ""
    return (
        f"The installed transformers ({transformers_version()}) has no class of this name either; where a newer one "
        "has it, pip install --upgrade transformers helps. "
    )


def _refusal(what: str, name: str, tried: str = "") -> ConfigError:
    """The error for a model that is not run, with those that are its relatives, as far as names tell."""
    relatives = _relatives(name[:_LONGEST_NAME])
    if relatives:
        change = json.dumps({"architectures": relatives[:1]})
        helps = (
            f"Nearest by name: {', '.join(relatives)}. They are other models: take a checkpoint of one of them; if "
            f"this one's maker says that it is built like one, name that with --hf-overrides '{change}'"
        )
    else:
        helps = "None has a name like it: take a model of one of them"
    heads = "" if name.endswith((_OF_TEXT, _OF_WHOLE)) else f". Classifiers on them end in {', '.join(HEADS)}"
    return ConfigError(
        f"config.json: {what}; this engine runs exactly one of {len(families())} architectures, which docs/models.md "
        f"lists, and causal classes of transformers whose layers are like theirs. {tried}{helps}{heads}"
    )


def _relatives(name: str) -> list[str]:
    """The architectures that begin with the same word as ``name``, the ones that are most like it first."""
    stem, alike = _stem(name), dict[str, float]()
    for one in families():
        word = max((found[0] for text in (name, one) if (found := _FIRST_WORD.match(text))), key=len).lower()
        if stem.startswith(word) and _stem(one).startswith(word):
            alike[one] = difflib.SequenceMatcher(None, stem, _stem(one)).ratio()
    return sorted(alike, key=lambda one: -alike[one])[:_MOST_RELATIVES]
