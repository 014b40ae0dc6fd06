"""The adapters (LoRA) of one linear layer: slots for pairs of matrices, split over the ranks as the layer is.

::

    column parallel                            row parallel
    A whole, B this rank's rows                A this rank's columns, B whole
    y_r = x W_r' + (x A') B_r'                 part_r = x_r W_r' + (x_r A_r') B'     the ranks' sum is x W' + x A' B'

An adapter needs no collective: a row-parallel layer adds it to its part, before the all-reduce.  A product made of
several modules has a pair for each (``kernels/linear/adapters.py`` draws the memory).  The scale is part of B.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tp_engine.errors import WeightError
from tp_engine.kernels.linear.adapters import AdapterRows, AdapterWeights, group_rows
from tp_engine.layers.context import LayerContext
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.layers.upload import upload_all
from tp_engine.plan import IntArray
from tp_engine.weights.lora import AdapterPair


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdapters:
    """The rows of a step with an adapter: among its ``num_tokens`` tokens, and among those whose outputs are read.

    The last layer computes only the latter.  If there are equally many, they are the same.
    """

    num_tokens: int
    of_tokens: AdapterRows
    of_wanted: AdapterRows

    def among(self, num_rows: int) -> AdapterRows:
        """The rows with an adapter among those that a layer computes."""
        return self.of_tokens if num_rows == self.num_tokens else self.of_wanted


def group_step(of_tokens: IntArray, of_wanted: IntArray | None, device: torch.device) -> StepAdapters:
    """Group a step whose tokens have adapters in the slots ``of_tokens`` (N,), -1 for none.

    ``of_wanted`` (n,) are the slots of those whose outputs are read; None: all, in order.
    """
    found = []
    for slots in (of_tokens, of_wanted):
        if slots is not None:
            rows, tiles = group_rows(slots)
            on_device = upload_all((rows, tiles), device)
            found.append(AdapterRows(rows=on_device[0], tiles=on_device[1], host_tiles=tiles))
    return StepAdapters(num_tokens=len(of_tokens), of_tokens=found[0], of_wanted=found[-1])


_step: ContextVar[StepAdapters | None] = ContextVar("step_adapters", default=None)


@contextmanager
def adapting(step: StepAdapters | None) -> Iterator[None]:
    """Run a model's forward pass inside of this block; ``step`` is None if none of its rows has an adapter."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def has_adapters() -> bool:
    """Whether a row of this step has an adapter."""
    return _step.get() is not None


def rows_of_step(num_rows: int) -> AdapterRows | None:
    """The rows of this step with an adapter among those that a layer computes; None if there are none."""
    step = _step.get()
    rows = None if step is None else step.among(num_rows)
    return rows if rows is not None and rows.num_rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPair:
    """This rank's share of an adapter in one layer, on the host: ``a`` (parts, r, in), ``b`` (r, out), scaled.

    r is the largest rank of the parts' modules.  ``layers/lora_experts.py`` has the shapes for stacks of experts.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.b.nbytes


class LoRALayerSlots(ABC):
    """The slots of a product to which a pair of matrices, or one for each part, is added; empty at first."""

    def __init__(self, num_places: int, in_size: int, part_sizes: tuple[int, ...], context: LayerContext) -> None:
        limits, self._dtype = context.adapters, context.dtype
        assert limits is not None
        rank, device = limits.max_rank, context.device
        a, b = (
            torch.zeros(size, dtype=context.dtype, device=device).add_(0)  # its pages exist from now on
            for size in ((num_places, len(part_sizes) * rank, in_size), (num_places, rank, sum(part_sizes)))
        )
        ranks = torch.zeros(num_places, dtype=torch.int32, device=device)
        self.weights = AdapterWeights(a=a, b=b, ranks=ranks, part_sizes=part_sizes)

    @property
    @abstractmethod
    def modules(self) -> list[str]:
        """The usual names of the modules of the product."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return self.weights.a.nbytes + self.weights.b.nbytes + self.weights.ranks.nbytes

    @abstractmethod
    def take(self, pairs: Mapping[str, AdapterPair], used: set[str], names: Mapping[str, str]) -> LocalPair | None:
        """This rank's share of an adapter's ``pairs``; None if it leaves this layer alone.

        ``names`` are the pairs' modules by their usual names; those that are taken are added to ``used``.
        Raises ``WeightError`` for a pair whose shape is not the layer's.
        """

    @abstractmethod
    def put(self, slot: int, pair: LocalPair | None) -> None:
        """Put ``pair``, or nothing, into ``slot``; does not wait for the device."""


class LinearAdapters(LoRALayerSlots):
    """The slots of a layer of ``shape``."""

    def __init__(self, shape: LinearShape, context: LayerContext) -> None:
        assert context.adapters is not None
        super().__init__(
            context.adapters.max_loras, shape.num_columns, tuple(part.room for part in shape.parts), context
        )
        self._shape, self._add, self._is_cuda = shape, context.op("add_adapters"), context.device.type == "cuda"

    @property
    def modules(self) -> list[str]:
        return [part.name for part in self._shape.parts]

    def add(self, out: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        """Add the products of ``x`` (n, in) with the adapters of ``rows`` to ``out`` (n, out) in place; return it."""
        self._add(out, x, self.weights, rows)
        return out

    def take(self, pairs: Mapping[str, AdapterPair], used: set[str], names: Mapping[str, str]) -> LocalPair | None:
        shape, own = self._shape, [names.get(part.name) for part in self._shape.parts]
        used.update(name for name in own if name is not None)
        rank = max((pairs[name].rank for name in own if name is not None), default=0)
        if not rank:
            return None
        a = torch.zeros(
            (len(shape.parts), rank, shape.num_columns), dtype=self._dtype, pin_memory=self._is_cuda, device="cpu"
        )
        b = torch.zeros((rank, shape.num_rows), dtype=self._dtype, pin_memory=self._is_cuda, device="cpu")
        for index, ((part, first), name) in enumerate(zip(shape.placed_parts(), own, strict=True)):
            if name is not None:
                pair = pairs[name]
                self._check(name, pair, part)
                columns = shape.columns
                a[index, : pair.rank, : columns.size] = pair.a.narrow(1, *columns)
                rows = part.decode(pair.b.narrow(0, *part.taken))
                b[: pair.rank, first : first + part.rows.size] = (rows.float() * pair.scale).T
        return LocalPair(a=a, b=b)

    def put(self, slot: int, pair: LocalPair | None) -> None:
        weights, rank = self.weights, 0 if pair is None else len(pair.b)
        a = weights.a[slot].view(len(weights.part_sizes), weights.max_rank, -1)
        a[:, rank:], weights.b[slot, rank:] = 0, 0
        if pair is not None:
            a[:, :rank].copy_(pair.a, non_blocking=True)
            weights.b[slot, :rank].copy_(pair.b, non_blocking=True)
        weights.ranks[slot] = rank

    def _check(self, name: str, pair: AdapterPair, part: Part) -> None:
        found, expected = (pair.a.shape[1], len(pair.b)), (self._shape.stored_columns, part.stored_rows)
        if found != expected:
            raise WeightError(
                f"the adapter of {name} has {found[0]} inputs and {found[1]} outputs; the module has {expected[0]} and "
                f"{expected[1]}: the adapter belongs to another model"
            )
