"""Candidates: several implementations of one operation, of which a device gets the fastest that is right on it.

::

    operation    its twin, its candidates in the order of a table, the code's own choice, inputs to try them with
    shape        what a candidate is made for: sizes, types, formats, of one weight of a rank
    choice       ((4, "panels"), (MANY, "onednn")): the first up to 4 rows, the second above

An operation with candidates is a module below ``tp_engine.kernels`` that names an ``OPERATION``, and a line of
``CANDIDATES``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import Any, TypeAlias

import torch

from tp_engine.system.units import ceil_div

MANY = 1 << 30  # of rows: more than a step has
_BLOCK = 1_000_003  # random numbers that are drawn; a host would need seconds for all of a large weight

# By operation: the module below ``tp_engine.kernels``, or a whole name with a colon in front.
CANDIDATES: dict[str, str] = {
    "int8_linear": "quantization.int8_products",
    "quantised_linear": "quantization.linear_candidates",
}

Shape: TypeAlias = Mapping[str, int | str]
"""What a product of one kind is made for: JSON's numbers and words alone, because it is a key in files."""

Inputs: TypeAlias = tuple[Any, ...]
"""What a candidate is called with; the first is a tensor (rows, ...)."""

Run: TypeAlias = Callable[..., torch.Tensor]

Choice: TypeAlias = tuple[tuple[int, str], ...]
"""The most rows, and the candidate for them, in rising order; the last line is for ``MANY``."""


def always(shape: Shape, device: torch.device) -> str | None:
    """``why_not`` of a candidate that runs anywhere."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One implementation.  ``build`` makes it from weights and their shape; what it returns is called with ``Inputs``.

    ``why_not`` says why a shape or a device cannot have it, None if it can.  It takes ``least_rows`` to ``most_rows``
    rows.  One that is not ``is_quick`` is only for a full search, or a pinned file.
    """

    name: str
    build: Callable[[Any, Shape], Run]
    why_not: Callable[[Shape, torch.device], str | None] = always
    least_rows: int = 1
    most_rows: int = MANY
    is_quick: bool = True

    def takes(self, num_rows: int) -> bool:
        """Whether it takes ``num_rows``."""
        return self.least_rows <= num_rows <= self.most_rows


Twin: TypeAlias = Callable[[Any, Shape, Inputs], tuple[torch.Tensor, torch.Tensor]]
"""The oracle for weights, a shape and inputs: the result in float64, and that of plain PyTorch in the model's type,
whose rounding error a candidate may have as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation and its ``candidates``; of equally fast ones the first is taken.

    ``weights`` makes random ones of a shape, ``inputs`` random rows for them, and ``rows_of`` cuts inputs down to some
    of their rows, so that a twin need not compute all.  ``copy`` copies weights that ``build`` keeps as they are.
    ``num_bytes`` is the least that a call reads.  ``sources`` are the files of the package (globs) that candidates are
    made of: times and proofs hold only while these do not change.
    """

    candidates: Sequence[Candidate]
    default: Callable[[Shape, torch.device], Choice]
    weights: Callable[[Shape, torch.device, torch.Generator], Any]
    inputs: Callable[[Shape, int, torch.device, torch.Generator], Inputs]
    twin: Twin
    num_bytes: Callable[[Shape], int]
    sources: Sequence[str]
    copy: Callable[[Any], Any] = lambda weights: weights
    rows_of: Callable[[Inputs, torch.Tensor], Inputs] = lambda inputs, rows: (inputs[0][rows], *inputs[1:])

    def named(self, name: str) -> Candidate | None:
        """The candidate ``name``; None if this version has none."""
        return next((one for one in self.candidates if one.name == name), None)


def operation(name: str, places: Mapping[str, str] | None = None) -> Operation:
    """The operation ``name``, from ``CANDIDATES`` or from other ``places``."""
    place = (CANDIDATES if places is None else places)[name]
    found = import_module(place[1:] if place.startswith(":") else f"tp_engine.kernels.{place}").OPERATION
    assert isinstance(found, Operation)
    return found


def key_of(name: str, shape: Shape) -> str:
    """The operation and its shape as one line, such as ``int8_linear in=576 out=960``."""
    return " ".join((name, *(f"{key}={value}" for key, value in shape.items())))


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen on this device, by ``key_of``; everything else is the code's own choice."""

    found: Mapping[str, Choice] = field(default_factory=dict)

    def of(self, name: str, shape: Shape, device: torch.device) -> Choice:
        """The choice for a product of ``shape`` on ``device``."""
        chosen = self.found.get(key_of(name, shape))
        return operation(name).default(shape, device) if chosen is None else chosen


DEFAULTS = Choices()


def normal(size: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed float32 numbers; ``generator`` is the CPU's, on every device."""
    block = torch.randn(min(_BLOCK, prod(size)), generator=generator, dtype=torch.float32, device="cpu")
    return _spread(block, size, device)


def integers(
    low: int, high: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Integers from ``low`` to below ``high``, otherwise like ``normal``."""
    block = torch.randint(low, high, (min(_BLOCK, prod(size)),), generator=generator, dtype=dtype, device="cpu")
    return _spread(block, size, device)


def _spread(block: torch.Tensor, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``block`` again and again.  Its length is a prime number, so no two rows of a weight are equal."""
    count = prod(size)
    return block.to(device).repeat(ceil_div(count, max(1, len(block))))[:count].view(size)


def build(name: str, weights: Any, shape: Shape, choice: Choice) -> list[tuple[int, Run]]:
    """The candidates that ``choice`` names, made from ``weights``, with the most rows of each."""
    table, made = operation(name), dict[str, Run]()
    for _, candidate in choice:
        if candidate not in made:
            found = table.named(candidate)
            assert found is not None, f"{name} has no candidate {candidate}: the choices were checked when they came"
            made[candidate] = found.build(weights, shape)
    return [(most, made[candidate]) for most, candidate in choice]


def pick(parts: Sequence[tuple[int, Run]], num_rows: int) -> Run:
    """The part of ``build``'s that is for ``num_rows``."""
    return next(run for most, run in parts if num_rows <= most)
