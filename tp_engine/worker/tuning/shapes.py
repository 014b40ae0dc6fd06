"""The products of a model that have candidates: their shapes on one rank, from config.json alone."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import EngineConfig
from tp_engine.kernels.candidates import Shape
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.weight_sizes import RankAlone
from tp_engine.worker.tuning.tuner import WantedShape


@runtime_checkable
class TunedFormat(Protocol):
    """A format whose products have candidates."""

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> tuple[str, Shape] | None:
        """Return the operation and the shape of the product of ``parameters``, which have no memory; None if it has no
        candidates there."""


def wanted_shapes(config: EngineConfig, model: ModelSpec, dtype: torch.dtype, device_type: str) -> list[WantedShape]:
    """Return the shapes of the job's first rank, each once, with the number of weights that have it."""
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
    counts: Counter[tuple[str, tuple[tuple[str, int | str], ...]]] = Counter()
    for module in built.modules():
        if not isinstance(module, LocalLinear) or not isinstance(module.format, TunedFormat):
            continue
        parameters = {name: one for name, one in module.named_parameters(recurse=False) if name != "bias"}
        found = module.format.tuned(parameters, module.shape, dtype, device_type)
        if found is not None:
            counts[found[0], tuple(found[1].items())] += 1
    return [WantedShape(operation=name, shape=dict(shape), count=count) for (name, shape), count in counts.items()]
