"""How a class's checkpoints name its tensors, found by the tensors themselves: what is written is not always what the
modules are called, and experts that a class keeps in one tensor may be written one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_engine.model_config.mlp import Activation, StoredExperts
from tp_engine.models.recognition.record import ModuleCall
from tp_engine.models.recognition.refusal import RefusalError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where a class keeps its experts: the tensors of inputs (one, or gate and up) and outputs, by attribute."""

    inputs: tuple[str, ...]
    down: str
    is_transposed: bool
    is_interleaved: bool
    activation: Activation

    def parts(self, module: nn.Module, expert: int) -> list[torch.Tensor]:
        """Gate and up, or up, each (I, H), and down (H, I) of one expert."""
        found = [getattr(module, name)[expert] for name in (*self.inputs, self.down)]
        *inputs, down = [one.T for one in found] if self.is_transposed else found
        if len(inputs) == 1 and self.activation.num_parts == 2:
            whole = inputs[0]
            inputs = [whole[0::2], whole[1::2]] if self.is_interleaved else list(whole.chunk(2))
        return [*inputs, down]

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """How many experts there are, and their inner elements."""
        shape = getattr(module, self.down).shape
        return shape[0], shape[1 if self.is_transposed else 2]


class StoredNames:
    """Of ``model``, whose tensors have values; its layers are below ``layers_path``."""

    def __init__(self, model: Any, layers_path: str) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        own = model.state_dict()
        self._stored: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, dict(own)))
        places = {_place(one): name for name, one in self._stored.items()}
        self._names = {
            name: name if name in self._stored and _place(self._stored[name]) == _place(one) else places[_place(one)]
            for name, one in own.items()
            if name in self._stored or _place(one) in places
        }
        self.layers_path, self.tail = self._layers(layers_path)
        self._own_path = layers_path

    def _layers(self, path: str) -> tuple[str, str]:
        """Where layers are written, and the last word of it."""
        for name, stored in self._names.items():
            if name.startswith(f"{path}.0.") and (found := re.match(r"(.*?\w+)\.0\.", stored)):
                return found[1], found[1].rpartition(".")[2]
        raise RefusalError("its checkpoints name its layers in a way that is not known")

    def module(self, path: str) -> str:
        """The name of a module that has a weight."""
        name = f"{path}.weight"
        return self._names.get(name, name).removesuffix(".weight")

    def below(self, prefix: str, path: str, tensor: str = "weight") -> str:
        """The name of a module below its layer, whose own path is ``prefix``; by that of its ``tensor``."""
        index = prefix.rpartition(".")[2]
        name = f"{path}.{tensor}" if tensor else path
        stored = self._names.get(name, name.replace(self._own_path, self.layers_path, 1))
        own = f"{self.layers_path}.{index}."
        if not stored.startswith(own) or (tensor and not stored.endswith(f".{tensor}")):
            raise RefusalError(f"its checkpoints call {name} {stored}")
        found = stored.removeprefix(own)
        return found.removesuffix(f".{tensor}") if tensor else found

    def experts(
        self, prefix: str, call: ModuleCall, parts: list[torch.Tensor], layout: ExpertLayout
    ) -> tuple[StoredExperts, ...]:
        """How the experts of ``call`` are written, and then how the class itself has them, with names below the layer.

        ``prefix`` is the layer's path, and ``parts`` are those of expert 1.
        """
        own = f"{self.layers_path}.{prefix.rpartition('.')[2]}."
        near = {name.removeprefix(own): one for name, one in self._stored.items() if name.startswith(own)}
        each = [_numbered(near, one) for one in parts]
        kept: list[StoredExperts] = []
        if all(each):
            names = [str(one).removesuffix(".weight") for one in each]
            kept.append(StoredExperts(kind="each", gate=names[0], up=names[-2], down=names[-1]))
        if len(layout.inputs) == 1:
            inputs, down = (self.below(prefix, f"{call.path}.{one}", "") for one in (layout.inputs[0], layout.down))
            whole = _whole(inputs, down, layout)
            if not kept or kept[0].gate.split(".")[0] == whole.gate.split(".")[0]:
                kept.append(whole)
        if not kept:
            raise RefusalError("its checkpoints keep its experts in a way that is not known")
        return tuple(kept)


def _whole(inputs: str, down: str, layout: ExpertLayout) -> StoredExperts:
    """All experts in the tensors ``inputs`` and ``down``."""
    suffix = ".weight" if inputs.endswith(".weight") and down.endswith(".weight") else ""
    name = inputs.removesuffix(suffix)
    return StoredExperts(
        kind="transposed" if layout.is_transposed else "fused",
        gate=name,
        up=name,
        down=down.removesuffix(suffix),
        interleaved=layout.is_interleaved,
        weight_suffix=suffix,
        bias_suffix="_bias",
    )


def _numbered(near: dict[str, torch.Tensor], values: torch.Tensor) -> str | None:
    """The name of the weight with these ``values``, with {} for the expert's number."""
    for name, one in near.items():
        if one.shape == values.shape and ".1." in name and name.endswith(".weight") and torch.equal(one, values):
            return name.replace(".1.", ".{}.", 1)
    return None


def _place(one: torch.Tensor) -> tuple[int, torch.Size]:
    return one.data_ptr(), one.shape
