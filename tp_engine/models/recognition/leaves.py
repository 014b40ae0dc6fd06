"""What a module computes, by its numbers on random inputs: a norm, an activation, a rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tp_engine.model_config.mlp import Activation, ActivationKind
from tp_engine.model_config.spec import NormSpec
from tp_engine.models.recognition.record import FLOATS
from tp_engine.models.recognition.refusal import RefusalError

_CLOSE = 2e-5

ACTIVATIONS: dict[ActivationKind, Callable[..., torch.Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "relu2": lambda up: functional.relu(up).square(),
}


def are_close(found: torch.Tensor | None, expected: torch.Tensor | None, within: float = _CLOSE) -> bool:
    """Whether both have the same elements in the same order, within a share of the largest; shapes may differ."""
    if found is None or expected is None or found.numel() != expected.numel():
        return False
    found, expected = found.reshape(-1).double(), expected.reshape(-1).double()
    return bool((found - expected).abs().max() <= within * expected.abs().max().clamp_min(1e-20))


def snapped(measured: float, owner: object) -> float:
    """``measured``, or the number that is an attribute of ``owner`` or a plain one, and equal to it within rounding."""
    named = [one for one in vars(owner).values() if type(one) in (int, float)]
    return next((float(one) for one in (1.0, *named) if abs(one - measured) <= 1e-4 * abs(measured)), measured)


def norm_of(module: nn.Module, name: str) -> NormSpec | None:
    """The norm that ``module`` is; None if it is none of ours."""
    own = dict(module.named_parameters(recurse=False))
    if len(own) != 1 or next(iter(own.values())).dim() != 1:
        return None
    (tensor, weight), generator = next(iter(own.items())), torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator, **FLOATS) + 0.3
    for kind in ("rms", "layer"):
        centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        for offset in (0.0, 1.0):
            scaled = weight.detach().float() + offset
            found = _called(module, x)
            if not are_close(found, centred * centred.square().mean(-1, keepdim=True).rsqrt() * scaled, 1e-3):
                continue
            eps = _epsilon(module, centred, scaled)
            spec = NormSpec(name=name, eps=eps, kind=kind, offset=offset, tensor=tensor)
            exact = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * scaled
            return spec if are_close(found, exact) else None
    return None


def _called(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            found = module(x)
    except (OSError, MemoryError):  # the machine's, not the module's
        raise
    except Exception:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _epsilon(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> float:
    """What is added to the mean square: measured on inputs so small that it matters."""
    small = x * 1e-4
    found = _called(module, small)
    assert found is not None, "it took larger inputs"
    place = int(small[0].abs().argmax())
    ratio = (small[0, place].double() * weight[place].double() / found[0, place].double()) ** 2
    return snapped(float(ratio - small[0].double().square().mean()), module)


def activation_of(parts: list[torch.Tensor], made: torch.Tensor) -> Activation | None:
    """The activation that makes ``made`` of gate and up, or of up alone."""
    for kind, function in ACTIVATIONS.items():
        if Activation(kind).num_parts == len(parts) and are_close(made, function(*parts)):
            return Activation(kind)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTurn:
    """How queries and keys turn: by the ``table`` of that name, its pairs neighbours or not, with a factor."""

    table: str
    is_interleaved: bool
    factor: float


class Rotations:
    """The tables of inverse frequencies that a model keeps, by the names of their buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = {
            name: buffer.detach().clone().float()
            for name, buffer in model.named_buffers()
            if buffer.dim() == 1 and buffer.is_floating_point() and "original" not in name and len(buffer) > 1
        }
        self._model = model

    def find(self, plain: torch.Tensor, turned: torch.Tensor, positions: torch.Tensor) -> HeadTurn | None:
        """What turns ``plain`` (n, heads, dim) into ``turned``; None: it does not turn.  Raises ``RefusalError``."""
        if are_close(turned, plain):
            return None
        for name, table in self.tables.items():
            if 2 * len(table) > plain.shape[-1]:
                continue
            factor = self._factor(name, plain, turned, 2 * len(table))
            for is_interleaved in (False, True):
                for expected in _turned(plain, table, positions, is_interleaved):
                    rest = expected.clone()
                    rest[..., : 2 * len(table)] *= factor
                    if are_close(turned, rest, 2e-4):
                        return HeadTurn(table=name, is_interleaved=is_interleaved, factor=factor)
        raise RefusalError("its queries and keys turn in a way that no table of its frequencies explains")

    def _factor(self, name: str, plain: torch.Tensor, turned: torch.Tensor, size: int) -> float:
        """How much longer a head is after it has turned, where cosines and sines have a factor."""
        own = [one[..., :size].double().square().sum() for one in (turned, plain)]
        return snapped(float((own[0] / own[1]) ** 0.5), self._model.get_submodule(name.rpartition(".")[0]))


def _turned(
    plain: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, is_interleaved: bool
) -> Iterator[torch.Tensor]:
    """``plain`` turned by ``table``, in each order of elements that scores cannot tell apart."""
    angles = (positions[:, None].float() * table)[:, None, :]
    cos, sin, size = angles.cos(), angles.sin(), 2 * len(table)
    own, rest = plain[..., :size], plain[..., size:]
    pairs = own.unflatten(-1, (-1, 2)) if is_interleaved else own.unflatten(-1, (2, -1)).transpose(-1, -2)
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    halves = torch.cat((turned.transpose(-1, -2).flatten(-2), rest), -1)
    yield halves
    yield torch.cat((turned.flatten(-2), rest), -1)


def constant_ratio(found: torch.Tensor, of: torch.Tensor) -> float | None:
    """The one number that ``of`` is multiplied by in ``found``; None if there is none."""
    one, other = found.reshape(-1).double(), of.reshape(-1).double()
    if one.numel() != other.numel():
        return None
    ratio = float(one @ other / (other @ other).clamp_min(1e-30))
    return ratio if are_close(one, other * ratio) else None


def number_of(config: Any, measured: float) -> float:
    """``measured``, or what is equal to it within rounding: 1, a number of the configuration, 1 divided by it, or the
    root of the width."""
    named = [one for one in vars(config).values() if type(one) in (int, float) and one]
    known = (1.0, *named, *(1.0 / one for one in named), config.hidden_size**0.5)
    return next((float(one) for one in known if abs(one - measured) <= 1e-5 * abs(measured)), measured)
