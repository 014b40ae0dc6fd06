"""The narrow model of a class in the native decoder: the same weights, the same tokens, and equal logits.

The weights go the way of every checkpoint: written by the class, read by the loader, by the names of the description.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.distributed.collectives import SingleRank
from tp_engine.errors import WeightError
from tp_engine.layers.attention import forward_context
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.recognition.model_class import NARROW_VOCAB, NARROW_WINDOW, ModelClass
from tp_engine.models.recognition.record import FLOATS, INTEGERS
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.whole import Recognised
from tp_engine.weights.loader import load_weights

_LENGTHS = (3 * NARROW_WINDOW, NARROW_WINDOW + 2)
_BLOCK_SIZE, _BLOCKS = 16, 2
_CLOSE = 1e-3
_CPU = torch.device("cpu")


def verify(model_class: ModelClass, found: Recognised) -> None:
    """Raise ``RefusalError`` unless the native decoder makes the class's logits of several sequences in one step."""
    plain = plain_model(model_class, found.recipe)
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(1, NARROW_VOCAB, (length,), generator=generator, **INTEGERS) for length in _LENGTHS]
    with torch.inference_mode():
        expected = torch.cat([plain(input_ids=one[None], use_cache=False).logits[0] for one in sequences]).float()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        try:
            logits = _native_logits(found.narrow.model(dtype="float32"), Path(folder), sequences)
        except WeightError as error:
            raise RefusalError(f"its tensors are not those of native layers: {error}") from error
    difference = float((logits - expected).abs().max() / expected.std().clamp_min(1e-3))
    if not difference <= _CLOSE:
        raise RefusalError(f"native layers with its weights give other logits (by {difference:.2g} of their deviation)")


def _native_logits(spec: ModelSpec, folder: Path, sequences: list[torch.Tensor]) -> torch.Tensor:
    """The logits of the checkpoint in ``folder`` by the native decoder (N, vocabulary)."""
    alone, groups = SingleRank(), spec.kv_layout.groups
    model = build_model(
        spec,
        communicator=alone,
        dtype=torch.float32,
        device=_CPU,
        backends=[TorchBackend()] * len(groups),
        max_model_len=_BLOCK_SIZE * _BLOCKS,
    )
    load_weights(dict(model.named_parameters()), spec, folder, info=alone.info)
    model.finish_loading()
    _bind_caches(model, len(sequences))
    lengths = np.asarray([len(one) for one in sequences], np.int32)
    positions = torch.cat([torch.arange(int(length), **INTEGERS) for length in lengths])
    with torch.inference_mode(), forward_context([_metadata(lengths)] * len(groups)):
        logits = model.compute_logits(model(torch.cat(sequences), positions))
    assert logits is not None, "a single rank has all logits"
    return logits


def plain_model(model_class: ModelClass, recipe: dict[str, Any]) -> Any:
    """The class's own model with its own attention."""
    try:
        return model_class.narrow(**recipe, implementation="eager")
    except ValueError:
        return model_class.narrow(**recipe, implementation="sdpa")


def _bind_caches(model: LanguageModel, num_sequences: int) -> None:
    for layer in model.attention_layers:
        sizes = num_sequences * _BLOCKS, _BLOCK_SIZE, layer.shape.num_kv_heads, layer.shape.head_dim
        layer.bind_kv_cache(torch.zeros(2, *sizes, **FLOATS))


def _metadata(lengths: np.ndarray[Any, np.dtype[np.int32]]) -> AttentionMetadata:
    """New requests of these lengths, all tokens in one step, each in blocks of its own."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    slots = [
        index * _BLOCKS * _BLOCK_SIZE + torch.arange(int(length), **INTEGERS) for index, length in enumerate(lengths)
    ]
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.cat(slots),
        block_table=torch.arange(len(lengths) * _BLOCKS, dtype=torch.int32, device=_CPU).view(len(lengths), -1),
        seq_lens=torch.from_numpy(lengths),
        query_start=torch.from_numpy(starts),
        host_query_lens=lengths,
        host_seq_lens=lengths,
    )
