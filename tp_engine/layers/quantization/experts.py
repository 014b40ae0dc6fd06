"""Where a layer's experts lie in checkpoints, and which values this rank takes.

::

    parameter       (experts, 2 * room, hidden)    gate rows, zeros, up rows, zeros; without a gate up alone
                    (experts, hidden, room)        down: columns of this rank, zeros

Each expert is a linear layer of gate and up, and one of down (``stored.LinearShape``); a checkpoint has tensors for
each of them, or stacks of all experts.

Experts are split by their inner size, or, with expert parallelism, each is whole on one rank.  Inner sizes that do
not divide by the ranks are split in blocks (``model_config.mlp.block_bounds``); every rank has room for the largest
part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tp_engine.layers.quantization.stored import WEIGHT, LinearShape, Part
from tp_engine.model_config.mlp import ExpertsSpec, StoredExperts, local_inner_size
from tp_engine.weights.source import Source, Span, block_share

_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a layer on one rank: those of the spec in ``experts``, and the inner elements ``inner`` of each.

    ``room`` is the number of inner elements that have memory here; unused ones are zero.  ``path`` is the MLP's.
    ``adds_down_bias``: this rank adds the down biases of its experts; if False, another rank adds them.  With
    ``num_shards`` the product is ``tree_sum.mix_experts_tree``, which keeps its sums unless it has all inner elements.
    """

    spec: ExpertsSpec
    hidden_size: int
    path: str
    experts: Span
    inner: Span
    room: int
    adds_down_bias: bool
    num_shards: int = 0

    @property
    def keeps_sums(self) -> bool:
        """Whether the product is float32, because other ranks' parts are added to it."""
        return self.num_shards > 0 and self.inner.size < self.spec.inner_size

    def rest_of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """All that ``ExpertWeights`` of loaded ``parameters`` have beside the two stacks."""
        down_bias = parameters.get("down_bias") if self.adds_down_bias else None
        biases = {"gate_up_bias": parameters.get("gate_up_bias"), "down_bias": down_bias}
        return {**biases, "first": self.experts.start, "activation": self.spec.activation}

    def gate_up(self, stored: StoredExperts) -> LinearShape:
        """One expert's gate and up: (2 * room, hidden), or up alone; ``{}`` in the names of its parts stands for its
        number."""
        size, inner = self.spec.inner_size, self.inner
        names, parts = stored.inputs(self.spec.activation), []
        for index, name in enumerate(names):
            part = Part(name=f"{self.path}.{name}", stored_rows=size, rows=inner, room=self.room)
            if stored.interleaved:
                part = replace(part, stored_rows=len(names) * size, first=index, step=len(names))
            elif stored.kind != "each":
                part = replace(part, stored_rows=len(names) * size, rows=Span(inner.start + index * size, inner.size))
            parts.append(part)
        whole_rows = Span(0, self.hidden_size)
        return LinearShape(stored_columns=self.hidden_size, columns=whole_rows, parts=tuple(parts))

    def down(self, stored: StoredExperts) -> LinearShape:
        """One expert's down: (hidden, room)."""
        rows = Span(0, self.hidden_size)
        part = Part(name=f"{self.path}.{stored.down}", stored_rows=rows.size, rows=rows, room=rows.size)
        return LinearShape(stored_columns=self.spec.inner_size, columns=self.inner, parts=(part,), room=self.room)

    def weight_sources(self, stored: StoredExperts, of_one: LinearShape) -> tuple[Source, ...]:
        """The sources of a parameter (experts, rows, columns), in the model's own type."""
        tensor = replace(WEIGHT, suffix=stored.weight_suffix, is_transposed=stored.kind == "transposed")
        return self.of_all(stored, of_one.sources(tensor), is_view=True)

    def bias_sources(self, stored: StoredExperts, of_one: LinearShape) -> tuple[Source, ...]:
        """The sources of a parameter (experts, rows)."""
        return self.of_all(stored, of_one.vector_sources(stored.bias_suffix), is_view=True)

    def of_all(self, stored: StoredExperts, of_one: Sequence[Source], *, is_view: bool = False) -> tuple[Source, ...]:
        """The sources of all experts, given those ``of_one``; ``is_view``: decoding only selects and transposes, so
        that a stack is decoded at once, without a copy."""
        if stored.kind == "each":
            return tuple(self._numbered(one, number) for number in range(self.spec.num_experts) for one in of_one)
        return tuple(self._stacked(one, is_view) for one in of_one)

    def _stacked(self, one: Source, is_view: bool) -> Source:
        def decode(values: torch.Tensor) -> torch.Tensor:
            if is_view:
                return one.decode(values.movedim(0, -1)).movedim(-1, 0)
            return torch.stack([one.decode(value) for value in values])

        return replace(
            one,
            shape=(self.spec.num_experts, *one.shape),
            taken=(self.experts, *one.taken),
            target=(Span(0, self.experts.size), *one.target),
            decode=decode,
        )

    def _numbered(self, one: Source, number: int) -> Source:
        """Expert ``number``'s own tensor; nothing is taken if the expert is on another rank."""
        place, taken, target = number - self.experts.start, one.taken, one.target
        is_here = 0 <= place < self.experts.size
        if not is_here:
            place, taken, target = 0, (_NOWHERE,) * len(taken), (_NOWHERE,) * len(target)
        return replace(
            one,
            name=one.name.format(number),
            taken=taken,
            target=(Span(place, int(is_here)), *target),
            decode=lambda values: one.decode(values).unsqueeze(0),
        )


def share_experts(
    spec: ExpertsSpec,
    hidden_size: int,
    path: str,
    *,
    rank: int,
    world_size: int,
    splits: bool,
    block: int = 1,
    num_shards: int = 0,
) -> ExpertsShape:
    """This rank's experts: a part of each if ``splits``, in whole blocks of ``block``, else some of them whole."""
    if splits:
        experts, inner = Span(0, spec.num_experts), block_share(spec.inner_size, rank, world_size, block=block)
    else:
        experts, inner = block_share(spec.num_experts, rank, world_size), Span(0, spec.inner_size)
    room = local_inner_size(spec.inner_size, world_size if splits else 1, block=block)
    assert not num_shards or room == inner.size, "check_tp_invariant refuses inner sizes with padding"
    return ExpertsShape(
        spec=spec,
        hidden_size=hidden_size,
        path=path,
        experts=experts,
        inner=inner,
        room=room,
        adds_down_bias=not splits or rank == 0,
        num_shards=num_shards,
    )
