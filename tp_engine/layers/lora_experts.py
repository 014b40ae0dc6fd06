"""The adapters (LoRA) of a layer's routed experts, for CPUs: rows with an adapter, pair by pair.

::

    PEFT's pair of a stack (E experts)        A (E * r, in): expert by expert      B (out, r * E): rank by rank
    here, a slot for each expert              A (slots * E, r, in)                 B (slots * E, r, out)

    gate and up    A whole, B this rank's gate rows and up rows
    down           A this rank's columns, B whole: the all-reduce adds the ranks' parts up

A pair of a row and an expert is then a row of ``kernels/linear/adapters.py`` with the slot ``slot * E + expert``.  The
product of gate and up, its adapter, the activation, the product of down, its adapter and the sum over a row's experts
are operations of their own.  Rows without an adapter go through the product of the layer.
"""

from collections.abc import Mapping

import numpy as np
import torch

from tp_engine.kernels.experts.experts import add_up
from tp_engine.kernels.experts.pairs import ExpertRun, pair_up
from tp_engine.kernels.linear.adapters import AdapterRows, group_rows
from tp_engine.layers.context import LayerContext
from tp_engine.layers.lora import LocalPair, LoRALayerSlots, rows_of_step
from tp_engine.layers.quantization.base import SeparateExperts
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.model_config.mlp import FUSED
from tp_engine.weights.lora import AdapterPair


class StackAdapters(LoRALayerSlots):
    """The slots of one stack, gate and up or down: ``of_one`` is the shape of one expert's."""

    def __init__(self, shape: ExpertsShape, of_one: LinearShape, context: LayerContext) -> None:
        assert context.adapters is not None
        num_places = context.adapters.max_loras * shape.experts.size
        super().__init__(num_places, of_one.num_columns, (of_one.num_rows,), context)
        self._of_one, self._experts, self._num_experts = of_one, shape.experts, shape.spec.num_experts
        self._path = shape.path

    @property
    def modules(self) -> list[str]:
        """The names that PEFT may give to the pair: a module's parameters nest, and some families have other names in
        transformers than in checkpoints."""
        mlps = dict.fromkeys((self._path, f"{self._path.rpartition('.')[0]}.mlp"))
        return [f"{mlp}.experts{nested}" for mlp in mlps for nested in ("", ".base_layer")]

    def take(self, pairs: Mapping[str, AdapterPair], used: set[str], names: Mapping[str, str]) -> LocalPair | None:
        """``LoRALayerSlots.take`` of the pair whose sizes are this stack's: ``a`` (experts, r, in) and ``b`` (experts,
        r, out)."""
        found = [names[name] for name in self.modules if name in names and self._fits(pairs[names[name]])]
        if not found:
            return None
        used.update(found)
        pair, of_one, experts = pairs[found[0]], self._of_one, self._experts
        a = torch.zeros((experts.size, pair.rank, of_one.num_columns), dtype=self._dtype, device="cpu")
        b = torch.zeros((experts.size, pair.rank, of_one.num_rows), dtype=self._dtype, device="cpu")
        columns = of_one.columns
        own_a = pair.a.view(self._num_experts, pair.rank, -1).narrow(0, *experts)
        a[..., : columns.size] = own_a.narrow(2, *columns)
        own_b = pair.b.view(-1, pair.rank, self._num_experts).narrow(2, *experts)
        for part, first in of_one.placed_parts():
            rows = own_b.narrow(0, *part.taken).float() * pair.scale
            b[..., first : first + part.rows.size] = rows.permute(2, 1, 0)
        return LocalPair(a=a, b=b)

    def put(self, slot: int, pair: LocalPair | None) -> None:
        weights, rank = self.weights, 0 if pair is None else pair.a.shape[1]
        places = slice(slot * self._experts.size, (slot + 1) * self._experts.size)
        weights.a[places, rank:], weights.b[places, rank:] = 0, 0
        if pair is not None:
            weights.a[places, :rank], weights.b[places, :rank] = pair.a, pair.b
        weights.ranks[places] = rank

    def _fits(self, pair: AdapterPair) -> bool:
        sizes = pair.a.shape[1], len(pair.b), len(pair.a)
        stored = self._of_one.stored_columns, self._of_one.parts[0].stored_rows
        return sizes == (*stored, self._num_experts * pair.rank)


class ExpertAdapters:
    """The slots of a layer's experts of ``shape``, and the products of rows with an adapter."""

    def __init__(self, shape: ExpertsShape, context: LayerContext) -> None:
        self._gate_up = StackAdapters(shape, shape.gate_up(FUSED), context)
        self._down = StackAdapters(shape, shape.down(FUSED), context)
        self._shape, self._add, self._gate = shape, context.op("add_adapters"), context.op("gate")

    @property
    def stacks(self) -> list[StackAdapters]:
        return [self._gate_up, self._down]

    def mix(
        self, product: SeparateExperts, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The result of ``product``, with the adapters of this step's rows."""
        rows = rows_of_step(len(x))
        if rows is None:
            return product(x, expert_ids, weights)
        adapted = rows.rows.long()
        is_base = torch.ones(len(x), dtype=torch.bool, device="cpu")
        is_base[adapted] = False
        base, out = is_base.nonzero()[:, 0], torch.empty_like(x)
        if len(base):
            out[base] = product(x[base], expert_ids[base], weights[base])
        out[adapted] = self._mix_adapted(product, x[adapted], expert_ids[adapted], weights[adapted], rows)
        return out

    def _mix_adapted(
        self,
        product: SeparateExperts,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        rows: AdapterRows,
    ) -> torch.Tensor:
        """``mix`` of ``rows`` alone, which all have an adapter."""
        experts, top_k = self._shape.experts, expert_ids.shape[1]
        pairs = pair_up(expert_ids.numpy() - experts.start, experts.size)
        outputs = x.new_zeros((len(x) * top_k, x.shape[1]))
        if pairs.runs:
            of_pair = pairs.order // top_k
            slots = rows.host_tiles[:, 2].repeat(rows.host_tiles[:, 1])[of_pair]
            numbers, tiles = group_rows(slots * np.int32(experts.size) + pairs.experts)
            grouped = AdapterRows(rows=torch.from_numpy(numbers), tiles=torch.from_numpy(tiles), host_tiles=tiles)
            made = self._multiply(product, x[torch.from_numpy(of_pair)], pairs.runs, grouped)
            outputs[torch.from_numpy(pairs.order)] = made
        return add_up(outputs.view(len(x), top_k, -1), weights).to(x.dtype)

    def _multiply(
        self, product: SeparateExperts, x: torch.Tensor, runs: list[ExpertRun], adapters: AdapterRows
    ) -> torch.Tensor:
        """The outputs of pairs, whose rows are ``x`` (P, hidden), at least one: (P, hidden)."""
        both = product.gate_up(x, runs)
        self._add(both, x, self._gate_up.weights, adapters)
        inner = self._gate(both, self._shape.spec.activation)
        out = product.down(inner, runs)
        self._add(out, inner, self._down.weights, adapters)
        return out
