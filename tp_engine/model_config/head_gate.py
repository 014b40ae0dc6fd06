"""Gates on the outputs of attention heads, as data.  No torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

GateFunction: TypeAlias = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGateSpec:
    """What multiplies a head's output before the output projection: ``function`` of a gate, which the layer's input
    makes, for each element, or one for the head (``is_per_head``).

    Its rows are those of the module ``name``; without one they follow each head's in the query projection.
    """

    name: str | None = None
    function: GateFunction = "sigmoid"
    is_per_head: bool = False
