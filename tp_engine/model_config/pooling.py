"""Whether a checkpoint is for text, embeddings or scores, from its architecture and its files.  No torch.

A classifier has an architecture of its own.  Models for embeddings and rerankers have the architecture of the language
model that they were trained from, so config.json alone does not tell: the former have the files of the
sentence-transformers library, and a reranker is known by its name.
"""

import dataclasses
from pathlib import Path

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.classifier import YES_OR_NO, ClassifierSpec
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.source import CONFIG_FILE, read_json
from tp_engine.model_config.spec import ModelSpec

_MODULES_FILE = "modules.json"
_BARE_NAMES = ("", "lm_head.")  # of a decoder that was saved without its head: no prefix ``model.``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """What the model is for: ``convert`` is ``none`` (text), ``embed`` or ``classify`` (scores, by its ``classifier``).

    Its embeddings may be cut to ``dimensions`` if these are not None: to any number if they are empty.
    """

    convert: str
    dimensions: tuple[int, ...] | None = None
    classifier: ClassifierSpec | None = None


TEXT = PoolingSpec(convert="none")


def read_pooling(model: str, folder: Path, convert: str, classifier: ClassifierSpec | None = None) -> PoolingSpec:
    """Return what the model in ``folder`` is for; ``model`` is what the user calls it, ``convert`` ``EngineConfig``'s.
    ``classifier`` is what its architecture says.

    Raises ``ConfigError`` for a model whose embeddings are not those of its last token, and for text by a classifier.
    """
    name = _own_name(model, folder)
    if classifier is not None and convert == "none":
        raise ConfigError(
            "convert is none, which means text, and the architecture in config.json is that of a classifier: leave "
            "convert out, or use the model that it was made from"
        )
    if convert in ("auto", "pooling") and (classifier is not None or "reranker" in name):
        convert = "classify"
    elif convert == "pooling" or (convert == "auto" and _is_for_embeddings(folder)):
        convert = "embed"
    elif convert == "auto":
        convert = "none"
    if convert == "classify":
        return PoolingSpec(convert=convert, classifier=classifier or YES_OR_NO)
    if convert != "embed":
        return PoolingSpec(convert=convert)
    _check_last_token(folder)
    config = read_json(folder / CONFIG_FILE)
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(size) is int and size > 0 for size in listed):
        return PoolingSpec(convert=convert, dimensions=tuple(sorted(listed)))
    is_free = config.get("is_matryoshka") is True or "qwen3-embedding" in name  # its model card says so
    return PoolingSpec(convert=convert, dimensions=() if is_free else None)


def pooled(spec: ModelSpec, pooling: PoolingSpec) -> ModelSpec:
    """Return ``spec`` as it is run: for embeddings, and for scores of a head, its checkpoint needs no output head, and
    for embeddings no head at all and no prefix of names."""
    if pooling.convert == "none" or (pooling.classifier is not None and not pooling.classifier.linears):
        return spec
    spec = dataclasses.replace(spec, tie_word_embeddings=True, has_own_head=False)
    if pooling.convert == "classify":
        return spec
    skipped = () if spec.classifier is None else tuple(f"{linear.name}." for linear in spec.classifier.linears)
    names = CheckpointNames(spellings=(*spec.names.spellings, _BARE_NAMES), skipped=(*spec.names.skipped, *skipped))
    return dataclasses.replace(spec, classifier=None, names=names)


def _is_for_embeddings(folder: Path) -> bool:
    """Whether the folder has the files of sentence-transformers, or a decoder that was saved without its head, unlike
    ``GPT2LMHeadModel``."""
    architecture = str((read_json(folder / CONFIG_FILE).get("architectures") or [""])[0])
    is_headless = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return (folder / _MODULES_FILE).is_file() or is_headless


def _own_name(model: str, folder: Path) -> str:
    """The last part of the model's name or folder, in small letters; of the hub's cache (``models--OWNER--NAME``) that
    folder's."""
    place = folder.resolve()
    own = place.parent.parent if place.parent.name == "snapshots" else place
    return f"{Path(model).name} {own.name}".lower()


def _check_last_token(folder: Path) -> None:
    for path in sorted(folder.glob("*_Pooling/config.json")):
        values = read_json(path)
        modes = [name.removeprefix("pooling_mode_") for name, value in values.items() if value is True]
        mode = values.get("pooling_mode", ", ".join(one for one in modes if one != "include_prompt"))
        if mode != "lasttoken":
            raise ConfigError(
                f"{path.parent.name}/{path.name}: the embeddings of this model are pooled by {shown(mode)}; this "
                "engine supports the last token's (lasttoken): use another model"
            )
