"""What layers with a recurrent state instead of attention share: their states, and decodes and prompts as two
operations.

Heads, or channels, are split over the ranks, and each rank keeps the states of its own.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.ops import kind_of
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.recurrent_candidates import shape_of
from tp_engine.layers.attention import current_metadata, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear, RowParallelLinear
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.kv_layout import StateKind
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.weights.source import Source, Span


class KeepsState(Layer):
    """A layer with a state of ``kind`` for each row.  CUDA graphs hold its draft rows if it ``can_record_drafts``."""

    can_record_drafts = True

    def __init__(self, kind: StateKind) -> None:
        super().__init__()
        self.kind = kind
        self.states: LayerStates | None = None

    def bind_states(self, states: LayerStates | None) -> None:
        """Keep the states of all rows here from now on; None: nowhere."""
        self.states = states


class RecurrentMixer(KeepsState):
    """Projections (``readers``), a recurrence, this rank's part of the output projection.

    The ``operation`` stands for two of ``kernels.ops``, which get what ``project`` makes of N tokens, and
    return (N, width); ``finish`` then makes what the output projection reads::

        NAME_decode(*inputs, rule, states, slots, runs)    one token of each row; draft rows continue others (``runs``)
        NAME_prefill(*inputs, rule, states, chunks)        chunks of prompts

    ``rule`` has the loaded constants.  ``states`` is None until ``bind_states``: memory is measured, with new requests,
    before there are states.
    """

    def __init__(
        self, spec: RecurrentSpec, hidden_size: int, *, operation: str, context: LayerContext, output: str = "out_proj"
    ) -> None:
        super().__init__(spec.kv_kind.on(context.world_size))
        self.out_proj = RowParallelLinear(spec.out_size, hidden_size, bias=False, context=context.at(output))
        self._rule: Any = None
        self._prefill = f"{operation}_prefill", shape_of(self.kind, context.dtype)
        self._step, self._chunks = context.op(f"{operation}_decode"), context.chosen(*self._prefill)
        self.is_recordable = context.can_record(f"{operation}_decode")
        # Twins read on the host which rows are drafts.
        self.can_record_drafts = kind_of(f"{operation}_decode", context.device.type) != "twin"

    @property
    def reduced_bytes(self) -> int:
        """Bytes of each token that ``finish`` all-reduces."""
        return 0

    @property
    @abstractmethod
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input."""

    @abstractmethod
    def make_rule(self) -> Any:
        """The constants, made from loaded weights."""

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        return (self._prefill,) if device_type == "cuda" else ()

    def finish_loading(self) -> None:
        """Make the constants."""
        self._rule = self.make_rule()

    def forward(self, x: Rows, wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        assert self._rule is not None, "finish_loading comes first"
        batch, inputs, parts = current_metadata(), self.project(x), []
        num_decodes = batch.num_decodes
        if num_decodes:
            assert self.states is not None and batch.decode_rows is not None, "decodes need the states of their rows"
            own = [one[:num_decodes] for one in inputs]
            parts.append(self._step(*own, self._rule, self.states, batch.decode_rows, batch.draft_runs))
        if len(x) > num_decodes:
            own = [one[num_decodes:] for one in inputs]
            parts.append(self._chunks(*own, self._rule, self.states, chunks_of(batch)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj.part(self.finish(only(wanted, out)))

    def project(self, x: Rows) -> list[torch.Tensor]:
        """The operation's inputs for ``x`` (N, hidden)."""
        return [reader(x) for reader in self.readers]

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """What the output projection reads, made from what the operation returns."""
        return out


def chunks_of(batch: AttentionMetadata) -> list[Chunk]:
    """The prefills of a step."""
    lengths = batch.host_query_lens[batch.num_decodes :]
    computed = batch.host_seq_lens[batch.num_decodes :] - lengths
    starts = lengths.cumsum() - lengths
    rows = batch.prefill_rows.tolist() or [-1] * len(lengths)
    return [
        Chunk(start, count, None if row < 0 else row, before == 0)
        for start, count, row, before in zip(starts.tolist(), lengths.tolist(), rows, computed.tolist(), strict=True)
    ]


def projection(parts: tuple[Part, ...], hidden_size: int, context: LayerContext) -> LocalLinear:
    """A linear layer that reads the stream, and whose rows are these ``parts`` of stored modules."""
    shape = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
    return LocalLinear(shape, bias=False, context=context)


def rows_of(name: str, stored: int, rows: Span, *, first: int = 0, count: int = 1, step: int = 1) -> Part:
    """These ``rows`` of the module ``name``, which has ``stored`` of them."""
    return Part(name=name, stored_rows=stored, rows=rows, room=rows.size, first=first, count=count, step=step)


def behind(first: int, rows: Span) -> Span:
    """``rows``, counted from row ``first`` on."""
    return Span(first + rows.start, rows.size)


def conv_sources(name: str, stored_channels: int, taps: int, rows: Sequence[Span]) -> tuple[Source, ...]:
    """The weights of the causal convolution ``name``, stored (channels, 1, taps) and kept (taps, channels), for the
    channels ``rows``, one after another."""
    first, sources = 0, []
    for own in rows:
        sources.append(
            Source(
                name=f"{name}.weight",
                shape=(stored_channels, 1, taps),
                taken=(own, Span(0, 1), Span(0, taps)),
                target=(Span(0, taps), Span(first, own.size)),
                decode=lambda values: values.squeeze(1).t(),
            )
        )
        first += own.size
    return tuple(sources)
