"""Candidates: several implementations of one operation, of which a device gets the fastest that is right on it.

::

    operation    its twin, its candidates in the order of a table, the code's own choice, inputs to try them with
    shape        what a candidate is made for: sizes, types, formats, of one weight of a rank
    choice       ((4, "panels"), (MANY, "onednn")): the first up to 4 rows, the second above

An operation with candidates is a file with an ``OPERATION``, and a line of ``CANDIDATES``; a candidate is a
row of the operation, and a file with its kernel.  An operation of which a kernel may be right or not used is the same,
with two candidates: the kernel, and plain PyTorch, which stays the code's own choice until the kernel has proven
itself.

What runs an operation asks for it by name: a product with weights through ``build`` and ``pick``, anything else through
``chosen``.  What a model runs is told to the tuner by ``Layer.kernels``.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, TypeAlias

import torch

from tp_engine.system.units import ceil_div

MANY = 1 << 30  # of rows: more than a step has
_BLOCK = 1_000_003  # random numbers that are drawn; a host would need seconds for all of a large weight

# By operation: the module below ``tp_engine.kernels``, or a whole name with a colon in front, and after # what it is
# called there, unless it is ``OPERATION``.
CANDIDATES: dict[str, str] = {
    "dense_linear": "linear.dense_candidates",
    "experts": "experts.experts_candidates",
    "int8_linear": "quantization.int8_products",
    "quantised_linear": "quantization.linear_candidates",
    "gated_delta_net_prefill": "recurrent_candidates#GATED_DELTA_NET",
    "mamba2_prefill": "recurrent_candidates#MAMBA2",
    "short_conv_prefill": "recurrent_candidates#SHORT_CONV",
    "decode_attention": "attention.paged_candidates#DECODE",
    "absorb_w_uk": "attention.latent_maps_candidates#ABSORB_OPERATION",
    "project_w_uv": "attention.latent_maps_candidates#PROJECT_OPERATION",
    "latent_decode_attention": "attention.latent_candidates#LATENT_DECODE",
    "latent_prompt_attention": "attention.latent_candidates#LATENT_PROMPT",
    "expanded_prompt_attention": ":tp_engine.attention.expanded",
    "prompt_attention": "attention.paged_candidates#PROMPT",
    "draw_of_shares": ":tp_engine.sampling.ranked_shares",
}

Shape: TypeAlias = Mapping[str, int | str]
"""What a product of one kind is made for: JSON's numbers and words alone, because it is a key in files."""

Wanted: TypeAlias = tuple[str, Shape]
"""An operation, and a shape that a model has of it."""

Inputs: TypeAlias = tuple[Any, ...]
"""What a candidate is called with; the first is a tensor (rows, ...).  Others may lie in tuples and dataclasses."""

Run: TypeAlias = Callable[..., torch.Tensor]

Results: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

Choice: TypeAlias = tuple[tuple[int, str], ...]
"""The most rows, and the candidate for them, in rising order; the last line is for ``MANY``."""


def always(shape: Shape, device: torch.device) -> str | None:
    """``why_not`` of a candidate that runs anywhere."""
    return None


def why_no_triton(shape: Shape, device: torch.device) -> str | None:
    """A candidate that needs a GPU and Triton."""
    if device.type != "cuda":
        return "it needs a GPU"
    return None if find_spec("triton") is not None else "the triton package is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One implementation.  ``build`` makes it from weights and their shape; what it returns is called with ``Inputs``.

    ``why_not`` says why a shape or a device cannot have it, None if it can.  It takes ``least_rows`` to ``most_rows``
    rows.  One that is not ``is_quick`` is only for a full search, or a pinned file.  One that rounds what others do not
    has a ``twin`` of its own, which rounds alike.
    """

    name: str
    build: Callable[[Any, Shape], Run]
    why_not: Callable[[Shape, torch.device], str | None] = always
    least_rows: int = 1
    most_rows: int = MANY
    is_quick: bool = True
    twin: "Twin | None" = None

    def takes(self, num_rows: int) -> bool:
        """Whether it takes ``num_rows``."""
        return self.least_rows <= num_rows <= self.most_rows


Twin: TypeAlias = Callable[[Any, Shape, Inputs], tuple[Results, Results]]
"""The oracle for weights, a shape and inputs, which it may change: the results in float64, and those of plain PyTorch
in the model's type, whose rounding error a candidate may have as well.  Integers must be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation and its ``candidates``; of equally fast ones the first is taken.

    ``weights`` makes random ones of a shape, ``inputs`` random rows for them, and ``rows_of`` cuts inputs down to some
    of their rows, so that a twin need not compute all; None: it must.  ``copy`` copies weights that ``build`` keeps as
    they are.  ``num_bytes`` is the least that a call reads.  ``sources`` are the files of the package (globs) that
    candidates are made of: times and proofs hold only while these do not change.

    A candidate returns a tensor, and changes those of its inputs that ``changed`` returns, and no other.  Errors are
    bounded for each row (``is_by_row``), or for a result as a whole.  What is not ``is_recorded`` never runs in a CUDA
    graph.  It is tried with ``least_rows`` to ``most_rows`` rows.  If it ``comes_first``, it is tried before others:
    the code's own choice is plain PyTorch, because no GPU has proven the kernel before.  Times are over copies of
    inputs too, if these are what takes the time to read (``copies_inputs``).  ``num_terms`` are those of a sum, None:
    as many as a row has numbers.
    """

    candidates: Sequence[Candidate]
    default: Callable[[Shape, torch.device], Choice]
    inputs: Callable[[Shape, int, torch.device, torch.Generator], Inputs]
    twin: Twin
    num_bytes: Callable[[Shape], int]
    sources: Sequence[str]
    weights: Callable[[Shape, torch.device, torch.Generator], Any] = lambda shape, device, generator: None
    copy: Callable[[Any], Any] = lambda weights: weights
    rows_of: Callable[[Inputs, torch.Tensor], Inputs] | None = lambda inputs, rows: (inputs[0][rows], *inputs[1:])
    changed: Callable[[Inputs], Sequence[torch.Tensor]] = lambda inputs: ()
    is_by_row: bool = True
    is_recorded: bool = True
    least_rows: int = 1
    most_rows: int = MANY
    comes_first: bool = False
    copies_inputs: bool = False
    num_terms: int | None = None

    def named(self, name: str) -> Candidate | None:
        """The candidate ``name``; None if this version has none."""
        return next((one for one in self.candidates if one.name == name), None)

    def takes(self, num_rows: int) -> bool:
        """Whether it may have ``num_rows``."""
        return self.least_rows <= num_rows <= self.most_rows


def operation(name: str, places: Mapping[str, str] | None = None) -> Operation:
    """The operation ``name``, from ``CANDIDATES`` or from other ``places``."""
    place = (CANDIDATES if places is None else places)[name]
    module, _, attribute = place.partition("#")
    loaded = import_module(module[1:] if module.startswith(":") else f"tp_engine.kernels.{module}")
    found = getattr(loaded, attribute or "OPERATION")
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
        found = self.found.get(key_of(name, shape))
        return operation(name).default(shape, device) if found is None else found

    def beside(self, key: str, choice: Choice) -> "Choices":
        """Return these and one more, which is none of ``CANDIDATES``."""
        return Choices({**self.found, key: choice})

    @property
    def digest(self) -> str:
        """A word that differs where a choice differs; ``own`` if all are the code's own."""
        lines = sorted(f"{key}: {choice}" for key, choice in self.found.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8] if lines else "own"


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


def chosen(name: str, shape: Shape, device: torch.device, choices: Choices, weights: Any = None) -> Run:
    """The operation ``name`` as ``choices`` have it for ``shape``, by the number of rows of the first input."""
    parts = build(name, weights, shape, choices.of(name, shape, device))
    if len(parts) == 1:
        return parts[0][1]
    return lambda *inputs: pick(parts, len(inputs[0]))(*inputs)
