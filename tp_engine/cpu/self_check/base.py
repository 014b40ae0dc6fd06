"""What the comparisons share: inputs of a type, and both results of a function."""

import ctypes
from collections.abc import Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, TypeAlias, get_args

import torch

from tp_engine.kernels.recurrent import LayerStates
from tp_engine.kernels.steps import decode_inputs, draft_inputs
from tp_engine.model_config.mlp import Activation, ActivationKind

ACTIVATIONS = tuple(Activation(kind) for kind in get_args(ActivationKind))
BLOCK_SIZE = 4
_WRITTEN = decode_inputs.RowTables, decode_inputs.DecodeInputs, draft_inputs.DraftInputs

Check: TypeAlias = tuple[str, torch.Tensor, torch.Tensor]
"""A kernel's name, its result, and the right one."""


class KernelChecks:
    """The kernels of ``library`` for tensors of ``dtype``; all draw from one generator, in the order of the calls."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library, self.dtype = library, dtype
        self.generator = torch.Generator().manual_seed(0)

    def wide(self, *shape: int) -> torch.Tensor:
        """Return normal numbers, float32."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def draw(self, *shape: int) -> torch.Tensor:
        """Return normal numbers of the type."""
        return self.wide(*shape).to(self.dtype)

    def both(
        self, native: ModuleType, twins: ModuleType, name: str, *given: Any, writes: bool = False
    ) -> Iterator[Check]:
        """Return what ``name`` of both modules makes of ``given``; if it ``writes``, or returns nothing, also what it
        leaves of the tensors among them."""
        own, other = _copies(given), _copies(given)
        found, expected = getattr(native, name)(self.library, *own), getattr(twins, name)(*other)
        if writes or found is None:
            found, expected = (found, own), (expected, other)
        for one, twin in zip(_tensors(found), _tensors(expected), strict=True):
            yield name, one, twin


def _copies(given: Any) -> Any:
    """``given`` with copies of the tensors in it, in the same strides."""
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu").copy_(given)
    if isinstance(given, LayerStates):
        return LayerStates(*map(_copies, given))
    if isinstance(given, _WRITTEN):
        return replace(given, **{one.name: _copies(getattr(given, one.name)) for one in fields(given)})
    return tuple(map(_copies, given)) if type(given) is tuple else given


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, _WRITTEN):
        found = tuple(getattr(found, one.name) for one in fields(found))
    if isinstance(found, tuple):
        return [tensor for one in found for tensor in _tensors(one)]
    return [found] if isinstance(found, torch.Tensor) else []
