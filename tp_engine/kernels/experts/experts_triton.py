"""A layer's experts in Triton: pairs sorted by expert, two grouped products, the sum over a token's pairs.

::

    sort            pairs of a token and an expert, by expert                         sort_triton
    gate and up     x of the pairs -> inner[pair], activated                          products_triton
    down            inner of the pairs -> outputs[pair]
    sum             program (token, columns): outputs of the token's pairs times their weights, in the order of j

Grids have room for the most blocks that the number of tokens can need, so a CUDA graph can hold all of it and the host
never waits.  No sum is atomic, and a product adds up its columns in blocks of one size for any number of rows, so a
row's result does not depend on the rest of the batch.  The structure is that of vLLM's ``fused_moe.py`` (Apache-2.0),
the code is this project's.
"""

from dataclasses import replace
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row_block, launch_row_blocks
from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.kernels.experts.grouped import GroupedExperts
from tp_engine.kernels.experts.products_triton import Tiles, multiply_pairs, tiles_for
from tp_engine.kernels.experts.sort_triton import sort_pairs
from tp_engine.kernels.jit import jit

# Average pairs per expert from which PyTorch's grouped products take over, on GPUs that have them.  In bfloat16, at
# 32,768 tokens, VeOmni measured 242 against 215 TFLOP/s for 128 experts, and 181 against 71 for 512.
GROUPED_MM_FROM = 512


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
    """``experts.mix_experts`` of ``weights``; shapes follow from the number of tokens alone.

    ``grouped`` multiplies many pairs, if it is given; ``tiles`` replaces the choice from ``TILES``, and
    ``grouped_mm_from`` replaces ``GROUPED_MM_FROM``.
    """

    is_recordable = True

    def __init__(
        self,
        weights: ExpertWeights[Weights],
        tiles: Tiles | None = None,
        *,
        grouped: GroupedExperts | None = None,
        grouped_mm_from: int = GROUPED_MM_FROM,
    ) -> None:
        gate_up, down = weights.gate_up, weights.down
        if not isinstance(gate_up, torch.Tensor) and not isinstance(down, torch.Tensor):
            gate_up, down = (one.map(torch.Tensor.contiguous) for one in (gate_up, down))
            weights = replace(weights, gate_up=gate_up, down=down)
        self._weights, self._tiles, self._grouped = weights, tiles, grouped
        self._grouped_mm_from = grouped_mm_from * weights.down.shape[0]

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, (num_tokens, top_k) = self._weights, expert_ids.shape
        num_experts, hidden, _ = experts.down.shape
        out = torch.empty_like(x)
        if not num_tokens:
            return out
        assert x.is_contiguous(), x.stride()
        num_pairs = num_tokens * top_k
        if self._grouped is not None and num_pairs >= self._grouped_mm_from:
            outputs = self._grouped(x, expert_ids, num_experts)
        else:
            tiles = self._tiles or tiles_for(num_pairs, num_experts)
            order = sort_pairs(expert_ids, experts.first, num_experts, tiles.block_m)
            inner = multiply_pairs(
                x, experts.gate_up, experts.gate_up_bias, order, tiles,
                pairs_per_row=top_k, activation=experts.activation,
            )  # fmt: skip
            outputs = multiply_pairs(inner, experts.down, experts.down_bias, order, tiles)
        arguments = outputs, expert_ids, weights, out, experts.first
        launch_row_blocks(sum_kernel, x, num_tokens, hidden, *arguments, EXPERTS=num_experts, TOP_K=top_k)
        return out


def add_gated_triton(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    num_tokens, width = x.shape
    assert total.is_contiguous() and x.is_contiguous(), (total.stride(), x.stride())
    launch_row_blocks(add_gated_kernel, x, num_tokens, width, total, x, gates, gates.stride(0))
