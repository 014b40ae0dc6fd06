"""What every layer is built from: its context, and the base class of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.kernels.candidates import DEFAULTS, Choices, Shape, Wanted, chosen
from tp_engine.kernels.ops import is_recordable, op
from tp_engine.layers.quantization.base import LinearFormat
from tp_engine.model_config.tp_invariant import NUM_SHARDS
from tp_engine.weights.source import Source, set_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """``max_loras`` adapters, of ranks up to ``max_rank``, have a slot on the devices at once.  If ``of_experts``, the
    slots have room for matrices of routed experts, too."""

    max_loras: int
    max_rank: int
    of_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The ranks that share a layer, where and how its weights are kept, and its ``path`` in the checkpoint.

    ``format_of(names)`` is the format of a linear layer made of the stored modules ``names``.  ``splits_experts``: a
    rank has a part of each expert; otherwise it has some experts whole (expert parallelism).  ``tp_invariant``: sums
    over columns are those of ``kernels/linear/tree_sum.py``.  ``adapters``: linear layers have slots for adapters.
    ``choices`` are the device's kernels.
    """

    communicator: Communicator
    dtype: torch.dtype
    device: torch.device
    format_of: Callable[[Sequence[str]], LinearFormat]
    path: str = ""
    splits_experts: bool = True
    tp_invariant: bool = False
    adapters: AdapterLimits | None = None
    choices: Choices = DEFAULTS

    def at(self, name: str) -> LayerContext:
        """The context of the module ``name`` inside of this one; without a name, this one."""
        return replace(self, path=".".join(part for part in (self.path, name) if part))

    @property
    def unadapted(self) -> LayerContext:
        """The context of a linear layer that no adapter may change."""
        return replace(self, adapters=None)

    def op(self, name: str) -> Callable[..., Any]:
        """The operation ``name`` of ``kernels.ops``, for this device."""
        return op(name, self.device.type)

    def chosen(self, name: str, shape: Shape) -> Callable[..., Any]:
        """The operation ``name``, for which GPUs have candidates by ``shape``."""
        return chosen(name, shape, self.device, self.choices) if self.device.type == "cuda" else self.op(name)

    def can_record(self, *names: str) -> bool:
        """Whether recordings can hold all of these operations."""
        return all(is_recordable(name, self.device.type) for name in names)

    def parameter(
        self, shape: Sequence[int], *sources: Sequence[Source], dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """An uninitialised weight on the device, which the loader fills from one of the alternative ``sources``."""
        values = torch.empty(tuple(shape), dtype=self.dtype if dtype is None else dtype, device=self.device)
        parameter = nn.Parameter(values, requires_grad=False)
        set_sources(parameter, *sources)
        return parameter

    def output(self, part: torch.Tensor) -> torch.Tensor:
        """The output of a row-parallel layer, given this rank's ``part``: that part, which ``joins`` adds up.

        With ``tp_invariant`` it is the sum of the ranks' float32 parts, in the model's type, so that what follows is
        the same on all ranks, and on any number of them.  A collective.
        """
        if not self.tp_invariant or self.world_size == 1:
            return part
        return self.communicator.tree_reduce(part, self.dtype)

    @property
    def joins(self) -> Communicator:
        """Adds up what row-parallel layers return; does nothing if each of them did."""
        return SingleRank() if self.tp_invariant else self.communicator

    @property
    def num_shards(self) -> int:
        """How many shards of a row-parallel layer's columns on this rank have sums of their own; 0: no shards."""
        return NUM_SHARDS // self.world_size if self.tp_invariant else 0

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.communicator.info.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share a layer."""
        return self.communicator.info.world_size


class Layer(nn.Module):
    """A part of the model; ``finish_loading`` prepares it once all weights have their values.

    After that, ``is_recordable`` says whether recordings of steps can hold all that it runs.
    """

    is_recordable = True

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        """Return the operations with candidates that it runs on such a device; its weights need no memory."""
        return ()

    def finish_loading(self) -> None:
        """Prepare for running; called once."""
