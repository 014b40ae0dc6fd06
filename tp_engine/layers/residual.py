"""From one block to the next: all-reduce, sum with the residual stream, norm; in one kernel or several, or in none.

Where the next block's products multiply 8-bit floats, the norm writes these instead of rows.  Where they normalise what
they read, and the block's last product adds to the stream, as Triton's products of few rows do, nothing is left to do::

    qkv, of the norm   heads, attention   o, added   gate and up, of the norm, activated   down, added
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.fused_linear import RowsToNorm
from tp_engine.kernels.ops import has_triton
from tp_engine.kernels.quantised.row_codes import RowCodes, Rows
from tp_engine.layers.adapters import has_adapters
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.formats.few_rows import BlockPart, NormInReaders, PartToAdd
from tp_engine.layers.formats.quantised_products import WantedCodes, wanted_codes
from tp_engine.layers.linear import LocalLinear, RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.symmetric_memory import SymmetricCommunicator
from tp_engine.weights.source import Source, whole


class StreamScale(Layer):
    """A stored number, by which the residual stream is multiplied."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        one = whole((1,))
        source = Source(name=context.path, shape=(1,), taken=one, target=one, init=1.0)
        self.weight, self.value = context.parameter((1,), (source,), dtype=torch.float32), 1.0

    def finish_loading(self) -> None:
        """Keep the number on the host, as an argument of the operations."""
        self.value = float(self.weight)


class Join:
    """Adds a block's output to the residual stream and normalises the stream for the next block.

    ``out_norm`` normalises the ranks' sum of the output, which is multiplied by ``scale`` when it is added; then the
    stream is multiplied by ``stream_scale``; ``next_norm`` normalises the stream.  Each may be None.  Without
    ``out_norm``, all-reduce, sum and norm are one operation.  ``is_summed``: the block has added up the ranks' parts.
    ``readers`` are all that reads the normalised stream.  ``writer`` makes the part, which nothing else reads.
    """

    def __init__(
        self,
        out_norm: Norm | None,
        next_norm: Norm | None,
        scale: float,
        readers: Sequence[LocalLinear] = (),
        writer: RowParallelLinear | None = None,
        *,
        stream_scale: StreamScale | None = None,
        is_summed: bool = False,
        context: LayerContext,
    ) -> None:
        self._out_norm, self._next_norm, self._scale, self._readers = out_norm, next_norm, scale, readers
        self._stream_scale, self._is_summed = stream_scale, is_summed
        self._communicator = context.joins
        self._add, self._add_norm = context.op("add"), context.op("add_norm")
        self._norm_codes = context.op("norm_codes")
        self._reduce_add_norm = reduce_add_norm(context.joins, self._add_norm)
        self.is_recordable = context.can_record("add", "add_norm")
        if writer is not None:
            only_adds = out_norm is None and stream_scale is None and not is_summed
            writer.is_added = only_adds and context.world_size == 1

    def __call__(self, part: BlockPart | None, residual: torch.Tensor) -> torch.Tensor:
        """Add ``part`` (N, hidden), this rank's part of the block's output, to ``residual`` in place.

        Returns what the next block reads.  Before the first block there is no part.  A collective; ``part`` may be
        overwritten.
        """
        out_norm, next_norm = self._out_norm, self._next_norm
        part = self._open(part, residual)
        if part is None:
            return residual if next_norm is None else next_norm(residual)
        scales = (self._scale,) if self._stream_scale is None else (self._scale, self._stream_scale.value)
        if out_norm is None and next_norm is not None and len(scales) == 1 and not self._is_summed:
            return self._reduce_add_norm(part, residual, next_norm.rule, self._scale)
        output = self._output(part)
        if next_norm is None:
            self._add(output, residual, *scales)
            return residual
        joined: torch.Tensor = self._add_norm(output, residual, next_norm.rule, *scales)
        return joined

    def for_readers(self, part: BlockPart | None, residual: torch.Tensor) -> Rows:
        """As when it is called, or what all readers would rather have: of few rows the stream, to normalise it
        themselves; of many rows only the codes, if no ``stream_scale`` comes before them.  Adapters multiply rows."""
        wanted, norm = self._wanted, self._next_norm
        part = self._open(part, residual)
        if norm is None or has_adapters():
            return self(part, residual)
        if part is None and self._norm_in_readers(len(residual)):
            return RowsToNorm(residual, norm.rule)
        if wanted is None or len(residual) <= wanted.more_than:
            return self(part, residual)
        codes: RowCodes
        if part is None:
            codes = self._norm_codes(residual, None, norm.rule, wanted.rule)
        else:
            codes = self._norm_codes(self._output(part), residual, norm.rule, wanted.rule, self._scale)
        return codes

    def _open(self, part: BlockPart | None, residual: torch.Tensor) -> torch.Tensor | None:
        """The part that is still to be added; none if its product has added it to ``residual``."""
        if not isinstance(part, PartToAdd):
            return part
        part.add_to(residual, self._scale)
        return None

    @cached_property
    def _norm_in_readers(self) -> NormInReaders:
        assert self._next_norm is not None, "without a norm nothing is asked"
        return NormInReaders([reader.loaded for reader in self._readers], self._next_norm.rule)

    @cached_property
    def _wanted(self) -> WantedCodes | None:
        if self._stream_scale is not None:
            return None
        return wanted_codes([reader.loaded for reader in self._readers])

    def _output(self, part: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        output = part if self._is_summed else self._communicator.all_reduce(part)
        return output if self._out_norm is None else self._out_norm(output)


class AddNorm(Protocol):
    """As ``layer_ops.add_norm``, of ``x`` (N, size) or of the ranks' sum of it; ``x`` may be overwritten."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /
    ) -> torch.Tensor: ...


def reduce_add_norm(communicator: Communicator, add_norm: AddNorm) -> AddNorm:
    """``add_norm`` of the ranks' sum: fused if the communicator has shared memory and ``fuses_norm``, else composed."""
    if communicator.info.world_size == 1:
        return add_norm
    if isinstance(communicator, SymmetricCommunicator) and communicator.fuses_norm and has_triton():
        return Fused(communicator, add_norm)
    return Composed(communicator, add_norm)


class Composed:
    """An all-reduce, then the norm: the oracle of the fused kernel."""

    def __init__(self, communicator: Communicator, add_norm: AddNorm) -> None:
        self._communicator, self._add_norm = communicator, add_norm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /) -> torch.Tensor:
        return self._add_norm(self._communicator.all_reduce(x), residual, rule, scale)


class Fused:
    """One kernel for tensors that are all-reduced in one shot, ``Composed`` for larger tensors."""

    def __init__(self, communicator: SymmetricCommunicator, add_norm: AddNorm) -> None:
        from tp_engine.kernels.ranks.reduce_norm_triton import all_reduce_add_norm_triton

        self._communicator = communicator
        self._composed = Composed(communicator, add_norm)
        self._kernel = all_reduce_add_norm_triton

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /) -> torch.Tensor:
        communicator = self._communicator
        if not communicator.begins_one_shot(x):
            return self._composed(x, residual, rule, scale)
        buffer, rank = communicator.buffer, communicator.info.rank
        return self._kernel(x, residual, rule, scale, buffers=buffer.addresses, signals=buffer.signals, rank=rank)
