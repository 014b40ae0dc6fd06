"""Where a parameter's values come from: each parameter says it itself, and the loader only obeys.

::

    stored tensor (rows, columns)            parameter (rows of several, columns of this rank)
    +---------------------------+            +-----------+
    |      | taken      |       |  decode    |           |
    |      +------------+       | ---------> |  target   |
    |                           |            |           |
    +---------------------------+            +-----------+

Several sources may fill one parameter, and several parameters may take parts of one stored tensor.  What no source
fills is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import nn


class Span(NamedTuple):
    """``size`` elements from ``start`` on, along one dimension."""

    start: int
    size: int


Spans: TypeAlias = tuple[Span, ...]
Decode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Pure: what was taken, as stored -> what goes into the parameter."""


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """No change."""
    return values


def whole(shape: Sequence[int]) -> Spans:
    """All of every dimension."""
    return tuple(Span(0, size) for size in shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Part of the stored tensor ``name`` of ``shape``: the spans ``taken``, decoded, go to the spans ``target``.

    ``name`` is in the usual spelling (``model.layers.3.mlp.up_proj.weight``), whatever the checkpoint's.  ``init`` is
    the value of dummy weights; None: random.
    """

    name: str
    shape: tuple[int, ...]
    taken: Spans
    target: Spans
    decode: Decode = as_stored
    init: float | None = None


def set_sources(parameter: nn.Parameter, sources: Sequence[Source]) -> None:
    """Let ``parameter`` say where it comes from."""
    parameter._sources = tuple(sources)  # type: ignore[attr-defined]


def sources_of(parameter: torch.Tensor) -> tuple[Source, ...]:
    """What ``set_sources`` was told."""
    sources: tuple[Source, ...] = parameter._sources  # type: ignore[attr-defined]
    return sources
