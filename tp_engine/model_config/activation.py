"""Which function the gate of an MLP goes through before it meets the other half of the projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

ActivationKind: TypeAlias = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu2"]

_CODES: dict[str, int] = {kind: code for code, kind in enumerate(get_args(ActivationKind))}


@dataclass(frozen=True, slots=True)
class Activation:
    """What an MLP makes of its gate and up (kernels/layer_ops.py has the formulas).

    ``alpha`` and ``limit`` are those of ``swiglu_clamped``: the slope of its sigmoid, and the bound of both halves.
    """

    kind: ActivationKind
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def code(self) -> int:
        """The kind's number in C and Triton: 0 to 3, in the order of ``ActivationKind``."""
        return _CODES[self.kind]


SILU = Activation("silu")
"""The activation of SwiGLU (https://arxiv.org/abs/2002.05202)."""
