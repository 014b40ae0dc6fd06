"""Experts with weights in panels (``panels.h``, ``quantised.h``, ``experts.c``), and the routing to them
(``routing.c``)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import get_args

import torch

from tp_engine.cpu.layout import DTYPE_CODES, ExpertPanels, Routing
from tp_engine.cpu.linear import fits_panels, multiply_packed
from tp_engine.cpu.ops import are_dense
from tp_engine.cpu.quantised import pack_quantised
from tp_engine.cpu.tape import address_of
from tp_engine.kernels import huge_pages
from tp_engine.kernels.experts import experts as expert_twins
from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.kernels.experts.pairs import ExpertRun
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.model_config.mlp import RouterScores, RoutingRule

MAX_EXPERTS, MAX_GROUPS = 1024, 64  # of routing.c


class NativeExperts:
    """``kernels.experts.mix_experts`` in C, for any number of rows; it keeps packed copies, not ``weights``.

    Rows have ``dtype``, None: that of the weights.  With ``num_shards`` the result is ``tree_sum.mix_experts_tree``,
    float32 if it ``keeps_sums``.
    """

    is_recordable = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: ExpertWeights[Weights],
        top_k: int,
        dtype: torch.dtype | None = None,
        *,
        num_shards: int = 0,
        keeps_sums: bool = False,
    ) -> None:
        assert num_shards or not keeps_sums, "only a tree's sums are kept"
        gate_up, down, activation = weights.gate_up, weights.down, weights.activation
        self._dtype = dtype = gate_up.dtype if isinstance(gate_up, torch.Tensor) else dtype or torch.float32
        self._library, self._top_k, self._num_parts = library, top_k, activation.num_parts
        self._out_dtype = torch.float32 if keeps_sums else dtype
        num_experts, hidden, inner = down.shape
        self._sizes = inner, hidden
        biases = [None if one is None else one.contiguous() for one in (weights.gate_up_bias, weights.down_bias)]
        experts = ExpertPanels(
            gate_up_bias=None if biases[0] is None else address_of(biases[0], dtype),
            down_bias=None if biases[1] is None else address_of(biases[1], dtype), first=weights.first,
            num_experts=num_experts, hidden=hidden, inner=inner, top_k=top_k, kind=activation.code,
            dtype=DTYPE_CODES[dtype], alpha=activation.alpha, limit=activation.limit, num_shards=num_shards,
            keeps_sums=keeps_sums,
        )  # fmt: skip
        self._panels: tuple[torch.Tensor, ...]
        if isinstance(gate_up, QuantisedWeight) and isinstance(down, QuantisedWeight):
            packed = [pack_quantised(library, gate_up, dtype, self._num_parts), pack_quantised(library, down, dtype, 1)]
            experts.quantised_gate_up, experts.quantised_down = (ctypes.addressof(one.form.contents) for one in packed)
            factors = [None if one.factors is None else address_of(one.factors, torch.float32) for one in packed]
            experts.gate_up_factors, experts.down_factors = factors
            self._panels, self.num_bytes = tuple(one.panels for one in packed), sum(one.num_bytes for one in packed)
            experts.kept = (*biases, *packed)
        else:
            assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
            self._panels = pack_experts(library, gate_up, self._num_parts), pack_experts(library, down, 1)
            experts.kept = (*biases, *self._panels)
        experts.gate_up, experts.down = map(address_of, self._panels)
        self._pointer = ctypes.pointer(experts)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self._dtype and x.is_contiguous() and x.shape[1] == self._sizes[1]
        assert expert_ids.shape[1] == self._top_k
        rows = len(x)
        out = torch.empty(x.shape, dtype=self._out_dtype, device="cpu")
        work = torch.empty(self._library.experts_work_bytes(self._pointer, rows), dtype=torch.uint8, device="cpu")
        self._library.mix_experts(self._pointer, x, expert_ids, weights, out, work, rows)
        return out

    def gate_up(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """A row's result is the same, bit for bit, whatever the other rows are."""
        _, panels, _, width = self._panels[0].shape
        both = self._multiply(x, self._panels[0], panels * width, runs)
        # Half of each panel is gate rows, the other half up rows, unless there are no gates.
        apart = both.view(len(x), panels, self._num_parts, -1).transpose(1, 2).reshape(len(x), self._num_parts, -1)
        return apart[..., : self._sizes[0]].reshape(len(x), -1)

    def down(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """A row's result is the same, bit for bit, whatever the other rows are."""
        return self._multiply(x, self._panels[1], self._sizes[1], runs)

    def _multiply(self, x: torch.Tensor, panels: torch.Tensor, out_size: int, runs: list[ExpertRun]) -> torch.Tensor:
        """``multiply_runs`` with the experts' ``panels``."""
        out = x.new_empty((len(x), out_size))
        for expert, first, count in runs:
            rows = slice(first, first + count)
            multiply_packed(self._library, x[rows], panels[expert], out[rows])
        return out


def takes_experts(weights: ExpertWeights[Weights]) -> bool:
    """Return whether ``NativeExperts`` takes ``weights``."""
    gate_up, down = weights.gate_up, weights.down
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return fits_panels(gate_up[0]) and fits_panels(down[0])
    return True


def pack_experts(library: ctypes.CDLL, weights: torch.Tensor, num_parts: int) -> torch.Tensor:
    """``weights`` (experts, out, in) in panels, expert after expert; ``num_parts`` 2 for gate and up."""
    num_experts, out_size, in_size = weights.shape
    width, items = library.panel_width(), in_size * weights.itemsize // 4
    panels = huge_pages.zeros((num_experts, -(-out_size // width), items, width), torch.float32)
    for weight, own in zip(weights, panels, strict=True):
        library.pack_weight(weight, own, out_size, items, num_parts, weights.dtype)
    return panels


def route(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None,
    load: routing.ExpertLoad | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, (rows, num_experts) = DTYPE_CODES.get(logits.dtype), logits.shape
    is_too_large = num_experts > MAX_EXPERTS or rule.num_groups > MAX_GROUPS
    if dtype is None or logits.stride(1) != 1 or is_too_large:
        return routing.route(logits, rule, correction, load, expert_scale)
    ids = torch.empty((rows, rule.top_k), dtype=torch.int32, device="cpu")
    weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device="cpu")
    library.route_tokens(
        _routing(rule, num_experts, dtype), logits, logits.stride(0), correction, expert_scale, ids, weights, None if
        load is None else load.counts, None if load is None else load.slots, rows,
    )  # fmt: skip
    return ids, weights


def to_float32(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in DTYPE_CODES or not x.is_contiguous():
        return routing.to_float32(x)
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    library.widen_rows_to_float32(x, out, *x.shape, x.dtype)
    return out


def add_gated(library: ctypes.CDLL, total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    if not (are_dense(total, x) and gates.dtype is x.dtype):
        expert_twins.add_gated(total, x, gates)
        return
    library.add_gated(total, x, gates, gates.stride(0), *x.shape, x.dtype)


@cache
def _routing(rule: RoutingRule, num_experts: int, dtype: int) -> ctypes._Pointer[Routing]:
    """The rule as C reads it."""
    return ctypes.pointer(
        Routing(
            num_experts=num_experts,
            top_k=rule.top_k,
            scores=get_args(RouterScores).index(rule.scores),
            renormalises=rule.renormalises,
            num_groups=rule.num_groups,
            top_groups=rule.top_groups,
            group_best=rule.group_best,
            dtype=dtype,
            sum_eps=rule.sum_eps,
            factor=rule.factor,
        )
    )
