"""The hyperbolic tangent, which bounds scores and logits: ``cap * tanh(x / cap)``."""

from __future__ import annotations

import triton
import triton.language as tl

_TWO_LOG2_E = tl.constexpr(2 * 1.4426950408889634)
# Below it four terms of the series are exact to float32; above it the difference of exponentials is.
_SMALL = tl.constexpr(0.2)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """float32 -> float32, within a few units in the last place; nothing overflows, and NaN stays NaN."""
    magnitude = tl.abs(x)
    shrunk = tl.exp2(magnitude * -_TWO_LOG2_E)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    return tl.where(magnitude < _SMALL, near, tl.where(x < 0, -far, far))
