"""The operations of a model that have candidates: their shapes on one rank, from config.json alone."""

from collections import Counter

import torch

from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.triton_backend import kernels_of
from tp_engine.attention.triton_mla import kernels_of_latents
from tp_engine.layers.attention import Attention
from tp_engine.layers.context import Layer
from tp_engine.models.causal_lm import build_model
from tp_engine.models.weight_sizes import RankAlone
from tp_engine.sampling.device_sampler import sampler_kernels
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.tuning.tuner import WantedShape


def wanted_shapes(effective: EffectiveConfig, device_type: str) -> list[WantedShape]:
    """Return the shapes of the job's first rank, each once, with the number of layers that have it."""
    config, model, needs = effective.config, effective.model, effective.attention_needs
    world_size = config.tensor_parallel_size
    built = build_model(
        model,
        communicator=RankAlone(world_size),
        dtype=effective.dtype,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(model.kv_layout_on(world_size).groups),
        max_model_len=1,
        quantization=config.quantization,
        enable_expert_parallel=config.enable_expert_parallel,
    )
    wanted = [one for module in built.modules() if isinstance(module, Layer) for one in module.kernels(device_type)]
    if config.attention_backend == "triton":
        of_attention = kernels_of_latents if needs.has_latents else kernels_of
        wanted += of_attention((one.shape for one in built.modules() if isinstance(one, Attention)), needs)
    wanted += sampler_kernels(world_size, device_type)
    counts = Counter((name, tuple(shape.items())) for name, shape in wanted)
    return [WantedShape(operation=name, shape=dict(shape), count=count) for (name, shape), count in counts.items()]
