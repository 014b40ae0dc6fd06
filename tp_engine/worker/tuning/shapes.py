"""The operations of a model that have candidates: their shapes on one rank, from config.json alone."""

from collections import Counter

import torch

from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import EngineConfig
from tp_engine.layers.context import Layer
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.weight_sizes import RankAlone
from tp_engine.sampling.device_sampler import sampler_kernels
from tp_engine.worker.tuning.tuner import WantedShape


def wanted_shapes(config: EngineConfig, model: ModelSpec, dtype: torch.dtype, device_type: str) -> list[WantedShape]:
    """Return the shapes of the job's first rank, each once, with the number of layers that have it."""
    world_size = config.tensor_parallel_size
    built = build_model(
        model,
        communicator=RankAlone(world_size),
        dtype=dtype,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(model.kv_layout_on(world_size).groups),
        max_model_len=1,
        quantization=config.quantization,
        enable_expert_parallel=config.enable_expert_parallel,
    )
    wanted = [one for module in built.modules() if isinstance(module, Layer) for one in module.kernels(device_type)]
    wanted += sampler_kernels(world_size, device_type)
    counts = Counter((name, tuple(shape.items())) for name, shape in wanted)
    return [WantedShape(operation=name, shape=dict(shape), count=count) for (name, shape), count in counts.items()]
