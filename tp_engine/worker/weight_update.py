"""New weights for a running model: an order that every rank follows or none.

::

    prepare   memory for a second copy? -> a second model: names, shapes, types checked, this rank's slices read, packed
    commit    the second model takes the place of the first, with its KV cache; recordings are made anew
    discard   the second model is dropped

The first model stays as it was until all ranks have a second one, so that a tensor that is missing or misshapen on any
rank changes nothing.  A second model is made exactly as at the start, which covers each format of weights, online
quantisation and tied heads, and gives the bits of an engine that starts with these weights.  It costs the memory of the
weights a second time for the time of the update.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tp_engine.errors import RequestError, WeightError
from tp_engine.model_config import load_model_config
from tp_engine.model_config.checkpoint_files import CheckpointHeaders
from tp_engine.model_config.pooling import pooled
from tp_engine.model_config.stored_model import with_head
from tp_engine.models.weight_sizes import local_weight_bytes
from tp_engine.system.units import format_gib
from tp_engine.worker.orders import Prepared

if TYPE_CHECKING:
    from tp_engine.model_config.spec import ModelSpec
    from tp_engine.models.language_model import LanguageModel
    from tp_engine.worker.effective_config import EffectiveConfig

_OWN_FIELDS = ("dtype", "eos_token_ids", "max_position", "max_position_key", "beside", "mtp")


class SharedFile(msgspec.Struct, frozen=True):
    """A safetensors file in memory that another process of this host shares, by its path and its inode."""

    path: str
    inode: int


def update_weights(
    running: EffectiveConfig,
    free_bytes: int,
    build: Callable[[EffectiveConfig, Path | Sequence[Path]], LanguageModel],
    take: Callable[[LanguageModel, EffectiveConfig], None],
    arguments: Mapping[str, Any],
) -> Prepared:
    """Prepare the order; its arguments are ``folder``, that of a checkpoint, or ``files``, shared ones that hold all
    tensors.

    ``free_bytes``: the memory of the device that this rank may still take.  ``build`` makes a model of the same kind
    with the weights of a source, and ``take`` runs it from the next step on.
    """
    files = msgspec.convert(arguments.get("files", []), list[SharedFile])
    if files and running.num_hosts > 1:
        raise RequestError("tensors in shared memory reach the ranks of one host; update from a shared folder")
    source: Path | list[Path] = [_opened(file) for file in files]
    if isinstance(source, list) and source:
        model = with_head(running.model, CheckpointHeaders(source))
    else:
        model, source = _same_model(arguments["folder"], running)
    effective = replace(running, model=model)
    needed = local_weight_bytes(model, effective.config.tensor_parallel_size, dtype=effective.config.dtype)
    if needed > free_bytes:
        on_gpu = effective.config.device == "cuda"
        remedy = "start the engine with a lower --gpu-memory-utilization" if on_gpu else "free some, or use more ranks"
        raise RequestError(
            f"the new weights need {format_gib(needed)} beside the old ones until the update ends, and "
            f"{format_gib(free_bytes)} are free on this rank; {remedy}"
        )
    return Prepared(partial(take, build(effective, source), effective))


def _opened(file: SharedFile) -> Path:
    if os.stat(file.path).st_ino != file.inode:
        raise WeightError(f"{file.path} is another file by now: the process that shares the weights has ended")
    return Path(file.path)


def _same_model(folder: str, effective: EffectiveConfig) -> tuple[ModelSpec, Path]:
    """The running model with a checkpoint's output head, and the checkpoint's local folder.

    ``RequestError`` if its config.json describes another model.
    """
    described, path = load_model_config(
        folder, hf_overrides=effective.config.hf_overrides, model_impl=effective.config.model_impl
    )
    described = pooled(described, effective.pooling).within(effective.max_model_len)
    if (own := effective.model.mtp) is not None:
        described = described.drafting_with(described.stored_mtp or own)
    running = replace(
        effective.model, tie_word_embeddings=described.tie_word_embeddings, has_own_head=described.has_own_head
    )
    described = replace(described, **{name: getattr(running, name) for name in _OWN_FIELDS})
    compared = (one.name for one in fields(running) if one.compare)
    different = [name for name in compared if getattr(described, name) != getattr(running, name)]
    if different:
        raise RequestError(
            f"config.json in {folder} describes another model than the running one (it differs in "
            f"{', '.join(different)}); only the weights of the same model can be replaced"
        )
    return running, path
