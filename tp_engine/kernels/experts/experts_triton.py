"""A layer's experts in Triton: pairs sorted by expert, two grouped products, the sum over a token's pairs.

::

    sort            pairs of a token and an expert, by expert                         sort_triton
    (codes          x, and inner, as 8-bit floats, if both products are of codes)     row_codes_triton
    (blocks         x, and inner, rounded in blocks, if the weights say so)           block_rows_triton
    gate and up     x of the pairs -> inner[pair], activated                          products_triton,
    down            inner of the pairs -> outputs[pair]                              block_products_triton
    sum             program (token, columns): outputs of the token's pairs times their weights, in the order of j

Grids have room for the most blocks that the number of tokens can need, so a CUDA graph can hold all of it and the host
never waits.  No sum is atomic, and a product adds up its columns in blocks of one size for any number of rows, so a
row's result does not depend on the rest of the batch.  The structure is that of vLLM's ``fused_moe.py`` (Apache-2.0),
the code is this project's.
"""

from dataclasses import replace
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row_block, launch_row_blocks
from tp_engine.kernels.experts.block_products_triton import BlockRows, multiply_block_pairs
from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.kernels.experts.grouped import GroupedExperts
from tp_engine.kernels.experts.products_triton import multiply_pairs
from tp_engine.kernels.experts.sort_triton import sort_pairs
from tp_engine.kernels.experts.tiles import Tiles, tiles_for
from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.block_rows_triton import encode_rows_triton, round_rows_triton
from tp_engine.kernels.quantization.row_codes import RowCodes, Rows, rule_for
from tp_engine.kernels.quantization.row_codes_triton import quantise_rows_triton


@triton.jit(do_not_specialize=["first_expert"])
@no_type_check
def sum_kernel(
    outputs, ids, weights, out, first_expert,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK columns of one token."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        expert = tl.load(ids + pair) - first_expert
        is_here = (expert >= 0) & (expert < EXPERTS)
        output = tl.load(outputs + pair * SIZE + column, mask=inside & is_here, other=0.0).to(tl.float32)
        total += output * tl.load(weights + pair)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)


@jit
def add_gated_kernel(total, x, gates, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: up to BLOCK columns of one token."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    gate = 1.0 / (1.0 + tl.exp(-tl.load(gates + token * stride).to(tl.float32)))
    place = token * SIZE + column
    added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * gate
    added += tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, added.to(total.dtype.element_ty), mask=inside)


class TritonExperts:
    """``kernels.experts.mix_experts`` of ``weights``; shapes follow from the number of tokens alone.

    ``tiles`` replaces the choice by the number of pairs.  If it ``rounds_rows``, both products read their rows as codes
    of 8-bit floats, with a scale where the weight has one.  Where the weights' rows are rounded in blocks, both read
    the values of those, or ``in_blocks`` their codes; NVFP4's x is then a row for each pair, by its expert's scale.
    """

    is_recordable = True

    def __init__(
        self,
        weights: ExpertWeights[Weights],
        tiles: Tiles | None = None,
        *,
        rounds_rows: bool = False,
        in_blocks: bool = False,
    ) -> None:
        gate_up, down = weights.gate_up, weights.down
        self._is_quantised = not isinstance(gate_up, torch.Tensor)
        if not isinstance(gate_up, torch.Tensor) and not isinstance(down, torch.Tensor):
            gate_up, down = (one.map(torch.Tensor.contiguous) for one in (gate_up, down))
            weights = replace(weights, gate_up=gate_up, down=down)
        self._weights, self._tiles, self._rounds_rows = weights, tiles, rounds_rows
        self._row_scales, self._in_blocks = _row_scales(weights), in_blocks

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, (num_tokens, top_k) = self._weights, expert_ids.shape
        num_experts = experts.down.shape[0]
        if not num_tokens:
            return torch.empty_like(x)
        assert x.is_contiguous(), x.stride()
        tiles = self._tiles or tiles_for(num_tokens * top_k, num_experts, is_quantised=self._is_quantised)
        order = sort_pairs(expert_ids, experts.first, num_experts, tiles.block_m)
        of_x, of_inner = self._scales_of_pairs(expert_ids)
        inner = self._multiply(
            self._rows(x, experts.gate_up, of_x), experts.gate_up, experts.gate_up_bias, order, tiles,
            pairs_per_row=top_k if of_x is None else 1, activation=experts.activation,
        )  # fmt: skip
        rows = self._rows(inner, experts.down, of_inner)
        outputs = self._multiply(rows, experts.down, experts.down_bias, order, tiles)
        return add_up_pairs(x, outputs, expert_ids, weights, experts.first, num_experts)

    def _scales_of_pairs(self, expert_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of both products' rows (pairs,); those of pairs whose expert is elsewhere are any."""
        if self._row_scales is None:
            return None, None
        local = (expert_ids.flatten() - self._weights.first).clamp(0, self._row_scales.shape[1] - 1)
        of_x, of_inner = self._row_scales.index_select(1, local)
        return of_x, of_inner

    def _multiply(self, x: Rows | BlockRows, weight: Weights, *others: Any, **options: Any) -> torch.Tensor:
        if not isinstance(x, BlockRows):
            return multiply_pairs(x, weight, *others, **options)
        assert not isinstance(weight, torch.Tensor), "codes are multiplied with codes"
        return multiply_block_pairs(x, weight, *others, **options)

    def _rows(self, x: torch.Tensor, weight: Weights, scales: torch.Tensor | None) -> Rows | BlockRows:
        if not isinstance(weight, torch.Tensor) and weight.rows is not None:
            if self._in_blocks:
                return BlockRows(*encode_rows_triton(x, weight.rows.kind, scales))
            return round_rows_triton(x, weight.rows.kind, scales)
        if not self._rounds_rows:
            return x
        assert not isinstance(weight, torch.Tensor), "codes are multiplied with codes"
        return RowCodes(*quantise_rows_triton(x, rule_for(weight).group))


def _row_scales(weights: ExpertWeights[Weights]) -> torch.Tensor | None:
    """The experts' scales of both products' rows (2, experts); None where rows have none."""
    both = [None if isinstance(one, torch.Tensor) else one.rows for one in (weights.gate_up, weights.down)]
    found = [one.scale for one in both if one is not None and one.scale is not None]
    return torch.stack(found) if found else None


class LibraryExperts:
    """``mix_experts`` by a library's grouped products."""

    is_recordable = True

    def __init__(self, weights: ExpertWeights[Weights], grouped: GroupedExperts) -> None:
        self._first, self._num_experts, self._grouped = weights.first, weights.down.shape[0], grouped

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = self._grouped(x, expert_ids, self._num_experts)
        return add_up_pairs(x, outputs, expert_ids, weights, self._first, self._num_experts)


def add_up_pairs(
    x: torch.Tensor,
    outputs: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    num_experts: int,
) -> torch.Tensor:
    """``outputs`` (N * k, hidden) of pairs times ``weights`` (N, k), added up in the order of k: like ``x``, which may
    not be contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, top_k = expert_ids.shape
    arguments = outputs, expert_ids, weights, out, first
    launch_row_blocks(sum_kernel, x, num_tokens, x.shape[1], *arguments, EXPERTS=num_experts, TOP_K=top_k)
    return out


def add_gated_triton(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    num_tokens, width = x.shape
    assert total.is_contiguous() and x.is_contiguous(), (total.stride(), x.stride())
    launch_row_blocks(add_gated_kernel, x, num_tokens, width, total, x, gates, gates.stride(0))
