"""From one block to the next: all-reduce, sum with the residual stream, norm.

Where the next block's products multiply 8-bit floats, the norm writes these instead of rows.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from tp_engine.kernels.quantization.row_codes import RowCodes, Rows
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.lora import has_adapters
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization.quantised_products import WantedCodes, wanted_codes
from tp_engine.weights.source import vector_source


class StreamScale(Layer):
    """A stored number, by which the residual stream is multiplied."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        source = vector_source(context.path, 1, init=1.0)
        self.weight, self.value = context.parameter((1,), (source,), dtype=torch.float32), 1.0

    def finish_loading(self) -> None:
        """Keep the number on the host, as an argument of the operations."""
        self.value = float(self.weight)


class Join:
    """Adds a block's output to the residual stream and normalises the stream for the next block.

    ``out_norm`` normalises the ranks' sum of the output, which is multiplied by ``scale`` when it is added; then the
    stream is multiplied by ``stream_scale``; ``next_norm`` normalises the stream.  Each may be None.  Sum and norm are
    one operation, and without ``out_norm`` the communicator's, which may have the all-reduce in it.  ``is_summed``: the
    block has already added up the parts.  ``readers`` are all layers that read the normalised stream.
    """

    def __init__(
        self,
        out_norm: Norm | None,
        next_norm: Norm | None,
        scale: float,
        readers: Sequence[LocalLinear] = (),
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
        self.is_recordable = context.can_record("add", "add_norm")

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first block: what is ``embedded`` (N, hidden)."""
        return embedded

    def __call__(self, part: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Add ``part`` (N, hidden), this rank's part of the block's output, to ``residual`` in place.

        Returns what the next block reads.  Before the first block there is no part.  A collective; ``part`` may be
        overwritten.
        """
        next_norm = self._next_norm
        if part is None:
            return residual if next_norm is None else next_norm(residual)
        scales = self._scale, 1.0 if self._stream_scale is None else self._stream_scale.value
        if next_norm is None:
            self._add(self._output(part), residual, *scales)
            return residual
        if self._out_norm is None and not self._is_summed:
            return self._communicator.all_reduce_add_norm(part, residual, next_norm.rule, *scales, self._add_norm)
        joined: torch.Tensor = self._add_norm(self._output(part), residual, next_norm.rule, *scales)
        return joined

    def for_readers(self, part: torch.Tensor | None, residual: torch.Tensor) -> Rows:
        """Add and normalise; for many rows return codes if all readers multiply codes, and there is no ``stream_scale``
        and no adapter."""
        wanted, norm = self._wanted, self._next_norm
        if norm is None or wanted is None or len(residual) <= wanted.more_than or has_adapters():
            return self(part, residual)
        codes: RowCodes
        if part is None:
            codes = self._norm_codes(residual, None, norm.rule, wanted.rule)
        else:
            codes = self._norm_codes(self._output(part), residual, norm.rule, wanted.rule, self._scale)
        return codes

    @cached_property
    def _wanted(self) -> WantedCodes | None:
        if self._stream_scale is not None:
            return None
        return wanted_codes([reader.loaded for reader in self._readers])

    def _output(self, part: torch.Tensor) -> torch.Tensor:
        output = part if self._is_summed else self._communicator.all_reduce(part)
        return output if self._out_norm is None else self._out_norm(output)
