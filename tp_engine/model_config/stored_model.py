"""What a checkpoint's tensors say of a model, where config.json says nothing or something else.  No torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tp_engine.model_config.checkpoint_files import CheckpointHeaders, are_equal
from tp_engine.model_config.heads import check_head
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.quantization import plain_modules
from tp_engine.model_config.spec import ModelSpec

_EMBEDDING = "model.embed_tokens.weight"
_OWN_HEAD = "the checkpoint has an output head that is not its embedding, and config.json ties both: the head is used"


def fitted(spec: ModelSpec, headers: CheckpointHeaders, *, says_dtype: bool = True) -> ModelSpec:
    """``spec`` with what the tensors say: whether there is an output head of its own, which modules are not quantised,
    and, unless config.json ``says_dtype``, the type of the model.

    The first holds whatever config.json says, as in transformers.  Without ``headers``, ``spec`` is the best estimate.
    """
    check_head(spec, headers)
    spec = with_mtp(with_head(spec, headers), headers)
    changes = dict[str, Any]()
    notes = [_OWN_HEAD] if headers.names and spec.has_own_head else []
    if headers.names and spec.quantization is not None:
        own = headers.names - spec.mtp_names(headers.names)
        # Lists of what is plain name indexers (DeepSeek-V3.2, GLM-5) wrongly or not at all.
        indexers = plain_modules({name for name in own if ".indexer." in name})
        changes["quantization"] = spec.quantization.found_among(own).without(indexers)
    if not says_dtype:
        changes["dtype"] = dtype = headers.dtype or spec.dtype
        why = "as the first tensors of the checkpoint" if headers.dtype else "by assumption, without its tensors"
        notes.append(f"config.json names no dtype: it is {dtype}, {why}")
    return dataclasses.replace(spec, notes=(*notes, *spec.notes), **changes)


def with_head(spec: ModelSpec, headers: CheckpointHeaders) -> ModelSpec:
    """``spec`` with the output head that the tensors have: the embedding, or one of its own."""
    if not headers.names:
        return spec
    return dataclasses.replace(spec, has_own_head=spec.tie_word_embeddings and has_own_head(spec.names, headers))


def with_mtp(spec: ModelSpec, headers: CheckpointHeaders) -> ModelSpec:
    """``spec`` with the modules of its head for multi-token prediction that are not quantised, which few checkpoints
    list; without this head, if the tensors have none."""
    if spec.stored_mtp is None or not headers.names:
        return spec
    is_stored = any(f"{name}.weight" in headers.names for name in spec.names.spell(spec.stored_mtp.projection))
    plain = () if spec.quantization is None else plain_modules(spec.mtp_names(headers.names))
    head = dataclasses.replace(spec.stored_mtp, plain_modules=plain) if is_stored else None
    return dataclasses.replace(spec, stored_mtp=head)


def has_own_head(names: CheckpointNames, headers: CheckpointHeaders) -> bool:
    """Return whether the checkpoint stores an output head other than a copy of its embedding."""
    heads = tuple(dict.fromkeys(head for _, head in names.spellings))
    stored = [name for name in headers.names if name.startswith(heads)]
    embedding = next(filter(None, map(headers.find, names.spell(_EMBEDDING))), None)
    copies = [name for name in stored if name.endswith(".weight")]
    if len(stored) != 1 or copies != stored or embedding is None:
        return bool(stored)
    head = headers.find(stored[0])
    return head is None or not are_equal(embedding, head)


def says_dtype(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json names the type of the weights."""
    parts = (values, values.get("text_config"))
    return any(isinstance(part, dict) and bool(part.get("dtype") or part.get("torch_dtype")) for part in parts)
