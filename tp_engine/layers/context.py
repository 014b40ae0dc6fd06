"""What every layer is built with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tp_engine.dist.collectives import Communicator
from tp_engine.layers.linear_method import LinearMethod, choose_gated_method, choose_linear_method
from tp_engine.model_config.activation import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The ranks that share a layer, and where and how its weights are kept.

    ``make_linear`` prepares the weights of the decoder's linear layers, once they have their values; ``make_gated``
    those of gate and up, whose method also applies the activation.
    """

    communicator: Communicator
    dtype: torch.dtype
    device: torch.device
    make_linear: Callable[[torch.Tensor], LinearMethod] = choose_linear_method
    make_gated: Callable[[torch.Tensor, Activation], LinearMethod] = choose_gated_method

    def empty(self, *shape: int) -> nn.Parameter:
        """A weight that the loader will fill; allocated on the device, in its final type, without initialisation."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

    def share(self, size: int) -> int:
        """This rank's part of a dimension that the configuration checks have found divisible."""
        world_size = self.communicator.info.world_size
        assert size % world_size == 0, f"{size} is not divisible by {world_size}"
        return size // world_size
