"""Experts with weights in panels (``panels.h``, ``quantised.h``, ``experts.c``), and the routing to them
(``routing.c``)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import get_args

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES, ExpertPanels, Routing
from tp_engine.cpu.kernels.linear import fits_panels, multiply_packed
from tp_engine.cpu.kernels.ops import are_dense
from tp_engine.cpu.kernels.quantised import pack_quantised
from tp_engine.kernels import huge_pages
from tp_engine.kernels.experts import experts as expert_twins
from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import ExpertWeights, QuantisedExpertWeights
from tp_engine.kernels.experts.pairs import ExpertRun
from tp_engine.model_config.mlp import RouterScores, RoutingRule

MAX_EXPERTS, MAX_GROUPS = 1024, 64  # of routing.c


class _InPanels:
    """Experts in C, for any number of rows."""

    is_recordable = True

    def __init__(self, library: ctypes.CDLL, experts: ExpertPanels, dtype: torch.dtype, top_k: int) -> None:
        self._library, self._dtype, self._top_k = library, dtype, top_k
        self._out_dtype = torch.float32 if experts.keeps_sums else dtype
        self._pointer = ctypes.pointer(experts)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self._dtype and x.is_contiguous() and expert_ids.shape[1] == self._top_k
        rows = len(x)
        out = torch.empty(x.shape, dtype=self._out_dtype)
        work = torch.empty(self._library.experts_work_bytes(self._pointer, rows), dtype=torch.uint8)
        self._library.mix_experts(
            self._pointer, x.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(), out.data_ptr(), work.data_ptr(),
            rows, torch.get_num_threads(),
        )  # fmt: skip
        return out


class NativeExperts(_InPanels):
    """``kernels.experts.mix_experts`` in C; it keeps packed copies, not ``weights``.

    With ``num_shards`` the result is ``tree_sum.mix_experts_tree``, float32 if it ``keeps_sums``.
    """

    def __init__(
        self, library: ctypes.CDLL, weights: ExpertWeights, top_k: int, *, num_shards: int = 0, keeps_sums: bool = False
    ) -> None:
        dtype = weights.gate_up.dtype
        assert num_shards or not keeps_sums, "only a tree's sums are kept"
        experts = _experts(weights, dtype, top_k)
        experts.num_shards, experts.keeps_sums = num_shards, keeps_sums
        gate_up, down = (
            pack_experts(library, one, parts)
            for one, parts in ((weights.gate_up, weights.activation.num_parts), (weights.down, 1))
        )
        experts.gate_up, experts.down = gate_up.data_ptr(), down.data_ptr()
        experts.kept = (*experts.kept, gate_up, down)
        self._gate_up, self._down, self._sizes = gate_up, down, (weights.down.shape[2], weights.down.shape[1])
        self._num_parts = weights.activation.num_parts
        super().__init__(library, experts, dtype, top_k)

    def gate_up(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """Do as ``SeparateExperts``; a row's result is the same, bit by bit, for any other rows."""
        _, panels, _, width = self._gate_up.shape
        both = self._multiply(x, self._gate_up, panels * width, runs)
        # Half of each panel is gate rows, the other half up rows, unless there are no gates.
        apart = both.view(len(x), panels, self._num_parts, -1).transpose(1, 2).reshape(len(x), self._num_parts, -1)
        return apart[..., : self._sizes[0]].reshape(len(x), -1)

    def down(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        """Do as ``SeparateExperts``; a row's result is the same, bit by bit, for any other rows."""
        return self._multiply(x, self._down, self._sizes[1], runs)

    def _multiply(self, x: torch.Tensor, panels: torch.Tensor, out_size: int, runs: list[ExpertRun]) -> torch.Tensor:
        """``multiply_runs`` with the experts' ``panels``."""
        out = x.new_empty((len(x), out_size))
        for expert, first, count in runs:
            rows = slice(first, first + count)
            multiply_packed(self._library, x[rows], panels[expert], out[rows])
        return out


class NativeQuantisedExperts(_InPanels):
    """``kernels.experts.mix_quantised_experts`` in C for x of ``dtype``; it keeps packed copies, not ``weights``."""

    def __init__(self, library: ctypes.CDLL, weights: QuantisedExpertWeights, dtype: torch.dtype, top_k: int) -> None:
        experts = _experts(weights, dtype, top_k)
        gate_up = pack_quantised(library, weights.gate_up, dtype, weights.activation.num_parts)
        down = pack_quantised(library, weights.down, dtype, 1)
        experts.gate_up, experts.down = gate_up.panels.data_ptr(), down.panels.data_ptr()
        experts.quantised_gate_up, experts.quantised_down = (
            ctypes.addressof(one.form.contents) for one in (gate_up, down)
        )
        experts.gate_up_factors, experts.down_factors = gate_up.factors_address, down.factors_address
        experts.kept = (*experts.kept, gate_up, down)
        self.num_bytes = gate_up.num_bytes + down.num_bytes
        super().__init__(library, experts, dtype, top_k)


def _experts(weights: ExpertWeights | QuantisedExpertWeights, dtype: torch.dtype, top_k: int) -> ExpertPanels:
    """What C reads of ``weights``, without the panels."""
    num_experts, hidden, inner = weights.down.shape
    biases = [None if one is None else one.contiguous() for one in (weights.gate_up_bias, weights.down_bias)]
    assert all(one is None or one.dtype is dtype for one in biases)
    experts = ExpertPanels(
        gate_up_bias=None if biases[0] is None else biases[0].data_ptr(),
        down_bias=None if biases[1] is None else biases[1].data_ptr(), first=weights.first, num_experts=num_experts,
        hidden=hidden, inner=inner, top_k=top_k, kind=weights.activation.code, dtype=DTYPE_CODES[dtype],
        alpha=weights.activation.alpha, limit=weights.activation.limit,
    )  # fmt: skip
    experts.kept = tuple(biases)
    return experts


def takes_experts(weights: ExpertWeights) -> bool:
    """Return whether ``NativeExperts`` takes ``weights``."""
    return fits_panels(weights.gate_up[0]) and fits_panels(weights.down[0])


def pack_experts(library: ctypes.CDLL, weights: torch.Tensor, num_parts: int) -> torch.Tensor:
    """``weights`` (experts, out, in) in panels, expert after expert; ``num_parts`` 2 for gate and up."""
    num_experts, out_size, in_size = weights.shape
    width, items = library.panel_width(), in_size * weights.itemsize // 4
    panels = huge_pages.zeros((num_experts, -(-out_size // width), items, width), torch.float32)
    for weight, own in zip(weights, panels, strict=True):
        library.pack_weight(
            weight.data_ptr(), own.data_ptr(), out_size, items, num_parts, DTYPE_CODES[weights.dtype],
            torch.get_num_threads(),
        )  # fmt: skip
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
    ids = torch.empty((rows, rule.top_k), dtype=torch.int32)
    weights = torch.empty((rows, rule.top_k))
    library.route_tokens(
        _routing(rule, num_experts, dtype), logits.data_ptr(), logits.stride(0),
        None if correction is None else correction.data_ptr(),
        None if expert_scale is None else expert_scale.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        None if load is None else load.counts.data_ptr(), None if load is None else load.slots.data_ptr(), rows,
        torch.get_num_threads(),
    )  # fmt: skip
    return ids, weights


def to_float32(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    dtype = DTYPE_CODES.get(x.dtype)
    if dtype is None or not x.is_contiguous():
        return routing.to_float32(x)
    out = torch.empty(x.shape)
    library.widen_rows_to_float32(x.data_ptr(), out.data_ptr(), *x.shape, dtype)
    return out


def add_gated(library: ctypes.CDLL, total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    if not (are_dense(total, x) and gates.dtype is x.dtype):
        expert_twins.add_gated(total, x, gates)
        return
    dtype, threads = DTYPE_CODES[x.dtype], torch.get_num_threads()
    library.add_gated(total.data_ptr(), x.data_ptr(), gates.data_ptr(), gates.stride(0), *x.shape, dtype, threads)


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
