"""Parameters and bytes of one rank's weights, counted in a model on the meta device, which has no memory."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.distributed.collectives import SingleRank
from tp_engine.job.topology import RankInfo
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization import HEAD, choose_formats
from tp_engine.model_config import padded_vocab_size
from tp_engine.model_config.spec import ModelSpec
from tp_engine.model_config.vision import VisionSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel

_OF_ROUTING = ("correction", "expert_scale")  # of experts; they are read whole


def local_parameters(model: ModelSpec, world_size: int, *, active_only: bool = False) -> int:
    """Parameters of one of ``world_size`` ranks, before any quantisation, with the padding of the vocabulary.

    ``active_only`` counts those that one token meets: of experts, the ones that it goes to.
    """
    sizes = _sizes(replace(model, quantization=None), model.vision, world_size, "bfloat16", None)
    return sizes.num_active if active_only else sizes.num_parameters


def layer_parameters(model: ModelSpec, world_size: int) -> int:
    """Parameters of the layers of one of ``world_size`` ranks that a token of a prompt meets; without the vocabulary's,
    of which it needs none or one row."""
    count = local_parameters(replace(model, vision=None), world_size, active_only=True)
    num_rows = padded_vocab_size(model.vocab_size, world_size) // world_size
    of_vocabulary = num_rows * model.hidden_size * (1 if model.is_tied else 2)
    return max(1, count - of_vocabulary)


def local_weight_bytes(
    model: ModelSpec, world_size: int, *, dtype: str, quantization: str | None = None, active_only: bool = False
) -> int:
    """Bytes of the weights of one of ``world_size`` ranks, as the checkpoint or ``quantization`` (online) keeps them.
    Each rank has all of a vision tower that is served."""
    sizes = _sizes(model, model.vision, world_size, dtype, quantization)
    return sizes.active_bytes if active_only else sizes.num_bytes


class RankAlone(SingleRank):
    """The first of ``world_size`` ranks, without the others."""

    def __init__(self, world_size: int) -> None:
        self.info = RankInfo(world_size=world_size)


@dataclass(slots=True)
class WeightSizes:
    """Numbers in the weights, and their bytes once loading has finished: of all, and of those that one token meets."""

    num_parameters: int = 0
    num_bytes: int = 0
    num_active: int = 0
    active_bytes: int = 0


@lru_cache(maxsize=256)
def _sizes(
    spec: ModelSpec, vision: VisionSpec | None, world_size: int, dtype: str, quantization: str | None
) -> WeightSizes:
    """``vision`` is that of ``spec``: equal specifications may have different ones."""
    model = build_model(
        replace(spec, vision=vision),
        communicator=RankAlone(world_size),
        dtype=getattr(torch, dtype),
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(spec.kv_layout_on(world_size).groups),
        max_model_len=1,
        quantization=quantization,
    )
    return weight_sizes(model, spec, quantization)


def weight_sizes(model: LanguageModel, spec: ModelSpec, quantization: str | None) -> WeightSizes:
    """Count a rank's ``model`` of ``spec`` before ``finish_loading``, which keeps it in ``quantization``."""
    found, table = WeightSizes(), None if model.layer_embeddings is None else model.layer_embeddings.table.weight
    for path, weight in model.named_parameters():
        place, _, name = path.rpartition(".")
        module, kept, share = model.get_submodule(place), weight.nbytes, 1.0
        if isinstance(module, LocalLinear | Experts):
            kept = module.format.kept_bytes(name, weight)
        if isinstance(module, Experts) and name not in _OF_ROUTING:
            share = module.shape.spec.rule.top_k / module.shape.spec.num_experts
        elif weight is table:
            share = 1 / len(table)
        found.num_parameters += weight.numel()
        found.num_bytes += kept
        found.num_active += round(weight.numel() * share)
        found.active_bytes += round(kept * share)
    if spec.is_tied and spec.quantization is None and quantization is not None:
        embedding = model.embed_tokens.weight
        assert embedding is not None
        copied = choose_formats(quantization)([HEAD]).kept_bytes("weight", embedding)
        if copied < embedding.nbytes:  # else the head has the embedding itself
            found.num_bytes += copied
            found.active_bytes += copied
    return found
