"""Architecture names of config.json and the classes that run them."""

from __future__ import annotations

from dataclasses import replace

import torch

from tp_engine.attention.base import Backends
from tp_engine.dist.collectives import Communicator
from tp_engine.layers.context import LayerContext
from tp_engine.layers.int8_linear import make_int8_gated, make_int8_linear
from tp_engine.model_config import ModelConfig
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.llama import LlamaForCausalLM
from tp_engine.models.mistral import MistralForCausalLM
from tp_engine.models.qwen2 import Qwen2ForCausalLM
from tp_engine.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    model.__name__: model for model in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def build_model(
    config: ModelConfig,
    *,
    communicator: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    backends: Backends,
    max_model_len: int,
    quantization: str | None = None,
) -> CausalLM:
    """This rank's part of the model, its weights allocated on ``device`` but not yet set.

    ``backends`` has one entry for each group of layers (``kv_layout_of``).  ``quantization`` is that of
    ``EngineConfig``; ``finish_loading`` of the model applies it.
    """
    context = LayerContext(communicator=communicator, dtype=dtype, device=device)
    if quantization is not None:
        context = replace(context, make_linear=make_int8_linear, make_gated=make_int8_gated)
    model = MODELS[config.architecture](config, backends=backends, max_model_len=max_model_len, context=context)
    return model.eval()
