"""The product of gate and up in an MLP.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

ActivationKind: TypeAlias = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu2"]


@dataclass(frozen=True, slots=True)
class Activation:
    """How gate and up become one.

    ==================  =====================================================================================
    ``silu``            ``silu(gate) * up``, SwiGLU (https://arxiv.org/abs/2002.05202)
    ``gelu_tanh``       ``gelu(gate) * up``, gelu by its tanh form (https://arxiv.org/abs/1606.08415)
    ``swiglu_clamped``  ``(u + 1) * g * sigmoid(alpha * g)``, g: gate up to ``limit``, u: up within +-``limit`` (gpt-oss)
    ``relu2``           ``relu(gate)^2 * up``
    ==================  =====================================================================================
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def code(self) -> int:
        """The kind as a number, for kernels."""
        return get_args(ActivationKind).index(self.kind)
