"""From one block to the next where the residual is several streams (``model_config/streams.py``,
``kernels/streams.py``).

A ``StreamJoin`` stands where a model of one stream has a ``Join``, so the decoder knows of neither.
"""

from collections.abc import Callable

import torch

from tp_engine.kernels.streams import MixtureRule
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import whole_linear
from tp_engine.layers.norm import Norm
from tp_engine.model_config.spec import LayerSpec
from tp_engine.model_config.streams import GatedStreamSpec, HyperConnectionSpec, StreamSpec
from tp_engine.weights.source import vector_source, whole_source


class StreamReader(Layer):
    """Reads one mixture of the streams; before a block, also puts the weights of its output into the rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (N, row_size) -> (N, hidden)."""
        raise NotImplementedError  # each rule has its own


class HyperConnection(StreamReader):
    """The reader of hyper-connections, in float32: tensors fn, base and scale, of the last one with ``prefix``."""

    def __init__(
        self, spec: HyperConnectionSpec, hidden_size: int, *, is_end: bool = False, context: LayerContext
    ) -> None:
        super().__init__()
        count, prefix = spec.count, "hc_" if is_end else ""
        self._parts = (count,) if is_end else (count, count, count * count)

        def stored(name: str, *shape: int) -> torch.nn.Parameter:
            source = whole_source(f"{context.path}.{prefix}{name}", shape)
            return context.parameter(shape, (source,), dtype=torch.float32)

        self.fn = stored("fn", sum(self._parts), count * hidden_size)
        self.base, self.scale = stored("base", sum(self._parts)), stored("scale", len(self._parts))
        self._rule: MixtureRule | None = None
        self._spec, self._read = spec, context.op("read_mixture")
        self.is_recordable = context.can_record("read_mixture")

    def finish_loading(self) -> None:
        """Repeat the scale of each part for its numbers."""
        spec, sizes = self._spec, torch.tensor(self._parts, dtype=torch.int64, device=self.scale.device)
        scale = self.scale.repeat_interleave(sizes)
        self._rule = MixtureRule(spec.count, self.fn, scale, self.base, spec.eps, spec.floor, spec.num_steps)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._rule is not None, "finish_loading comes first"
        mixture: torch.Tensor = self._read(rows, self._rule)
        return mixture


class GatedStreams(StreamReader):
    """The reader of gated streams; the one after the last layer makes no weights of an output."""

    def __init__(self, spec: GatedStreamSpec, hidden_size: int, *, is_end: bool = False, context: LayerContext) -> None:
        super().__init__()
        width = spec.count * hidden_size
        source = vector_source(f"{context.path}.hc_norm.weight", width, init=0.0)
        self.weight = context.parameter((width,), (source,))
        self.down = whole_linear("input_mix_weight_down", width, spec.rank, context)
        self.up = whole_linear("input_mix_weight_up", spec.rank, width, context)
        self.inject = None if is_end else whole_linear("block_inject_weight", width, spec.count, context)
        names = "norm_streams", "gate_low", "read_gated"
        self._spec, (self._norm, self._gate_low, self._read) = spec, map(context.op, names)
        self.is_recordable = context.can_record(*names)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        count = self._spec.count
        normed = self._norm(rows, self.weight, count, self._spec.eps)
        gates = self.up(self._gate_low(self.down(normed), count))
        made = None if self.inject is None else self.inject(normed)
        mixture: torch.Tensor = self._read(rows, normed, gates, made, count)
        return mixture


class MeanOfStreams(StreamReader):
    """The plain mean, which is read after the last layer of some models."""

    def __init__(self, spec: StreamSpec, hidden_size: int) -> None:
        super().__init__()
        self._shape = spec.count, hidden_size
        self.is_recordable = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        count, hidden_size = self._shape
        mean: torch.Tensor = rows[:, : count * hidden_size].unflatten(1, self._shape).mean(1)
        return mean


READERS: dict[type[StreamSpec], Callable[..., StreamReader]] = {
    HyperConnectionSpec: HyperConnection,
    GatedStreamSpec: GatedStreams,
}


def make_reader(spec: StreamSpec, name: str | None, hidden_size: int, *, context: LayerContext) -> StreamReader:
    """The reader of ``spec`` named ``name``, below ``context``; without a name the mean, after the last layer."""
    if name is None:
        return MeanOfStreams(spec, hidden_size)
    is_end = name == spec.end
    return READERS[type(spec)](spec, hidden_size, is_end=is_end, context=context.at(name))


class StreamJoin:
    """Writes a block's output to the streams, and reads for the next block: what ``Join`` does with one stream.

    ``out_norm`` normalises the ranks' sum of the output, ``next_norm`` the mixture; each may be None.
    """

    def __init__(
        self,
        spec: StreamSpec,
        reader: StreamReader,
        out_norm: Norm | None,
        next_norm: Norm | None,
        *,
        context: LayerContext,
    ) -> None:
        self._spec, self._reader, self._out_norm, self._next_norm = spec, reader, out_norm, next_norm
        self._communicator = context.joins
        self._spread, self._write = context.op("spread_streams"), context.op("write_streams")
        self._is_mixed = isinstance(spec, HyperConnectionSpec)
        self.is_recordable = context.can_record("spread_streams", "write_streams")

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """The residual's rows (N, row_size) of ``embedded`` (N, hidden)."""
        rows: torch.Tensor = self._spread(embedded, self._spec.count, self._spec.row_size(embedded.shape[1]))
        return rows

    def __call__(self, part: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """Write ``part`` (N, hidden), this rank's part of the block's output, to the streams of ``rows``, in place.

        Returns what the next block reads.  Before the first block there is no part.  A collective; ``part`` may be
        overwritten.
        """
        if part is not None:
            output = self._communicator.all_reduce(part)
            output = output if self._out_norm is None else self._out_norm(output)
            self._write(output, rows, self._spec.count, is_mixed=self._is_mixed)
        mixture: torch.Tensor = self._reader(rows)
        return mixture if self._next_norm is None else self._next_norm(mixture)

    def for_readers(self, part: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """The same: no codes are made of a mixture."""
        return self(part, rows)


def read_within(
    layer: LayerSpec,
    spec: StreamSpec,
    out_norm: Norm | None,
    next_norm: Norm | None,
    *,
    hidden_size: int,
    context: LayerContext,
) -> tuple[StreamReader, StreamReader, StreamJoin]:
    """What reads for both blocks of a ``layer``, and the join between them, with these norms."""
    assert layer.stream_scale is None and layer.residual_scale == 1.0, "outputs have weights of their own"
    assert not layer.is_parallel and layer.beside is None and layer.embedding is None
    first, second = (make_reader(spec, name, hidden_size, context=context) for name in (spec.attention, spec.mlp))
    return first, second, StreamJoin(spec, second, out_norm, next_norm, context=context)
