"""Where a layer's experts lie in checkpoints, and which of their values this rank takes.

::

    parameter       (experts, 2 * room, hidden)    gate rows, zeros, up rows, zeros
                    (experts, hidden, room)        down: columns of this rank, zeros

Experts are split by their inner size, or, with expert parallelism, each is whole on one rank.  Inner sizes that do
not divide by the ranks are split in blocks (``weights/source.block_share``); every rank has room for the largest part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp_engine.model_config.mlp import ExpertsSpec, StoredExperts, local_inner_size
from tp_engine.weights.source import Source, Span, Spans, block_share, whole

_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a layer on one rank: the spec's experts ``experts``, and of each its inner elements ``inner``.

    ``room`` is the number of inner elements that have memory here; unfilled ones are zero.  ``path`` is the MLP's.
    ``adds_down_bias``: this rank adds the down biases of its experts; if False, another rank adds them.
    """

    spec: ExpertsSpec
    hidden_size: int
    path: str
    experts: Span
    inner: Span
    room: int
    adds_down_bias: bool

    def gate_up_sources(self) -> tuple[tuple[Source, ...], ...]:
        """The alternatives for a parameter (experts, 2 * room, hidden): gate rows, then up rows."""
        return tuple(self._both(one, is_bias=False) for one in self.spec.stored)

    def gate_up_bias_sources(self) -> tuple[tuple[Source, ...], ...]:
        """The alternatives for a parameter (experts, 2 * room)."""
        return tuple(self._both(one, is_bias=True) for one in self.spec.stored)

    def down_sources(self) -> tuple[tuple[Source, ...], ...]:
        """The alternatives for a parameter (experts, hidden, room)."""
        hidden, inner = Span(0, self.hidden_size), self.inner
        sizes = (self.hidden_size, self.spec.inner_size)
        target = (hidden, Span(0, inner.size))
        return tuple(
            self._sources(one, one.down + one.weight_suffix, sizes, (hidden, inner), target) for one in self.spec.stored
        )

    def down_bias_sources(self) -> tuple[tuple[Source, ...], ...]:
        """The alternatives for a parameter (experts, hidden)."""
        hidden = Span(0, self.hidden_size)
        return tuple(
            self._sources(one, one.down + one.bias_suffix, (self.hidden_size,), (hidden,), (hidden,))
            for one in self.spec.stored
        )

    def _both(self, stored: StoredExperts, *, is_bias: bool) -> tuple[Source, ...]:
        """Gate, then up."""
        inner, size = self.inner, self.spec.inner_size
        suffix = stored.bias_suffix if is_bias else stored.weight_suffix
        columns = () if is_bias else (self.hidden_size,)
        sources: tuple[Source, ...] = ()
        for index, name in enumerate((stored.gate, stored.up)):
            rows, total, step = inner, size, 1
            if stored.kind != "each":
                total = 2 * size
                if stored.interleaved:
                    rows, step = Span(2 * inner.start, 2 * inner.size), 2
                else:
                    rows = Span(inner.start + index * size, inner.size)
            sources += self._sources(
                stored,
                name + suffix,
                (total, *columns),
                (rows, *whole(columns)),
                (Span(index * self.room, inner.size), *whole(columns)),
                first=index if stored.interleaved else 0,
                step=step,
            )
        return sources

    def _sources(
        self,
        stored: StoredExperts,
        name: str,
        shape: tuple[int, ...],
        taken: Spans,
        target: Spans,
        *,
        first: int = 0,
        step: int = 1,
    ) -> tuple[Source, ...]:
        """The sources of each expert's tensor of ``shape`` (rows, columns) or (rows,): ``taken`` goes to ``target``."""
        path = f"{self.path}.{name}"
        if stored.kind == "each":
            return tuple(
                self._source_of_one(number, path, shape, taken, target) for number in range(self.spec.num_experts)
            )
        is_turned = stored.kind == "transposed" and len(shape) == 2

        def decode(values: torch.Tensor) -> torch.Tensor:
            rows_first = values.transpose(1, 2) if is_turned else values
            return rows_first[:, first::step]

        if is_turned:
            shape, taken = shape[::-1], taken[::-1]
        experts = (self.experts, Span(0, self.experts.size))
        return (
            Source(
                name=path,
                shape=(self.spec.num_experts, *shape),
                taken=(experts[0], *taken),
                target=(experts[1], *target),
                decode=decode,
            ),
        )

    def _source_of_one(self, number: int, path: str, shape: tuple[int, ...], taken: Spans, target: Spans) -> Source:
        """Expert ``number``'s own tensor; nothing is taken if the expert is on another rank."""
        place = number - self.experts.start
        if not 0 <= place < self.experts.size:
            place, taken, target = 0, (_NOWHERE,) * len(taken), (_NOWHERE,) * len(target)
        return Source(
            name=path.format(number),
            shape=shape,
            taken=taken,
            target=(Span(place, min(1, taken[0].size)), *target),
            decode=_as_one_expert,
        )


def share_experts(
    spec: ExpertsSpec, hidden_size: int, path: str, *, rank: int, world_size: int, splits: bool
) -> ExpertsShape:
    """This rank's experts: a part of each if ``splits``, else some of them whole."""
    if splits:
        experts, inner = Span(0, spec.num_experts), block_share(spec.inner_size, rank, world_size)
    else:
        experts, inner = block_share(spec.num_experts, rank, world_size), Span(0, spec.inner_size)
    return ExpertsShape(
        spec=spec,
        hidden_size=hidden_size,
        path=path,
        experts=experts,
        inner=inner,
        room=local_inner_size(spec.inner_size, world_size if splits else 1),
        adds_down_bias=not splits or rank == 0,
    )


def _as_one_expert(values: torch.Tensor) -> torch.Tensor:
    """A tensor of one expert as a stack of one."""
    return values.unsqueeze(0)
