"""A layer's experts in Triton: pairs sorted by expert, two grouped products, the sum over a token's pairs.

::

    pair            token * top_k + j, of the token's j-th expert
    sorted pairs    expert 0's pairs, padded to whole blocks of BLOCK_M, then expert 1's ...; padding is `num_pairs`
    block expert    the expert of each block of BLOCK_M places, -1 after the last one

    count           program e: how many pairs go to expert e
    sort            program e: where its blocks begin (all counts before), its pairs there, in their order
    gate and up     program (block, columns): x of the block's pairs -> inner[pair], activated
    down            program (block, columns): inner of the block's pairs -> outputs[pair]
    sum             program (token, columns): outputs of the token's pairs times their weights, in the order of j

Grids have room for the most blocks that the number of tokens can need; the real number of blocks stays on the device,
so a CUDA graph holds all of it and the host never waits.  No sum is atomic, and a product adds up its columns in blocks
of one size for any number of rows, so a row's result does not depend on the rest of the batch.  The shape is vLLM's
(``fused_moe.py``, Apache-2.0), the code is this project's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.elementwise_triton import activation_constants, gate_triton, gated
from tp_engine.kernels.experts import ExpertWeights
from tp_engine.units import ceil_div

_SCAN, _COLUMNS = 1024, 1024


class Tiles(NamedTuple):
    """How a grouped product is cut: rows, outputs and columns of a program's tile, its warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The most pairs per expert, on average, and the tiles.  scripts/bench_experts.py times them; not yet measured on a GPU.
TILES = (
    (8, Tiles(16, 64, 64, 4, 4)),
    (32, Tiles(32, 64, 64, 4, 4)),
    (128, Tiles(64, 128, 64, 4, 3)),
    (1 << 30, Tiles(128, 128, 64, 8, 3)),
)


# Pairs per expert, on average, from which PyTorch's grouped product takes over in bfloat16, on GPUs that have it.  At
# 32,768 tokens VeOmni measured 242 to 215 TFLOP/s for 128 experts, and 181 to 71 for 512.  Not yet measured here.
GROUPED_MM_FROM = 512
_GROUPED_MM_CAPABILITY = (9, 0)


def tiles_for(num_pairs: int, num_experts: int) -> Tiles:
    """The tiles of ``TILES`` for ``num_pairs``."""
    return next(tiles for most, tiles in TILES if num_pairs <= most * num_experts)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])  # type: ignore[untyped-decorator]
def count_kernel(  # type: ignore[no-untyped-def]
    ids,
    counts,
    num_pairs,
    first_expert,
    SCAN: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: the pairs of one expert."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    offset = tl.arange(0, SCAN)
    total = tl.zeros((SCAN,), tl.int32)
    for start in range(0, num_pairs, SCAN):
        found = tl.load(ids + start + offset, mask=start + offset < num_pairs, other=-1)
        total += (found == expert + first_expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "first_expert"])  # type: ignore[untyped-decorator]
def sort_kernel(  # type: ignore[no-untyped-def]
    ids,
    counts,
    sorted_pairs,
    block_experts,
    num_pairs,
    num_blocks,
    first_expert,
    EXPERTS: tl.constexpr,  # noqa: N803
    BLOCK_E: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    SCAN: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: the places of one expert's pairs, and its blocks; the last one also marks unused blocks."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    blocks = (tl.load(counts + index, mask=index < EXPERTS, other=0) + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(index < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(index == expert, blocks, 0), 0)
    offset = tl.arange(0, SCAN)
    end = first_block + own_blocks
    for start in range(first_block, end, SCAN):
        tl.store(block_experts + start + offset, expert, mask=start + offset < end)
    if expert == EXPERTS - 1:
        for start in range(end, num_blocks, SCAN):
            tl.store(block_experts + start + offset, -1, mask=start + offset < num_blocks)
    place = first_block * BLOCK_M
    for start in range(0, num_pairs, SCAN):
        pair = start + offset
        is_own = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
        before = tl.cumsum(is_own.to(tl.int32), 0) - is_own.to(tl.int32)
        tl.store(sorted_pairs + place + before, pair, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    # Fewer than BLOCK_M places are left in the expert's last block.
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(sorted_pairs + padding, num_pairs, mask=padding < end * BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def grouped_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    sorted_pairs,
    block_experts,
    num_pairs,
    IN: tl.constexpr,  # noqa: N803
    OUT: tl.constexpr,  # noqa: N803
    PAIRS_PER_ROW: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: BLOCK_N outputs of the pairs of one block.

    The row of a pair in ``x`` (rows, IN) is pair // PAIRS_PER_ROW; ``out`` is (num_pairs, OUT).  If GATED, ``weight``
    (experts, 2 * OUT, IN) has gate rows, then up rows.
    """
    let_next_begin(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    parts: tl.constexpr = 2 if GATED else 1
    item = tl.arange(0, BLOCK_K)
    row_place = x + (pair // PAIRS_PER_ROW)[:, None] * IN
    weight_place = weight + (expert * parts * OUT + column)[None, :] * IN
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, IN, BLOCK_K):
        is_item = start + item < IN
        rows = tl.load(row_place + (start + item)[None, :], mask=is_pair[:, None] & is_item[None, :], other=0.0)
        mask = is_item[:, None] & inside[None, :]
        gates = tl.load(weight_place + (start + item)[:, None], mask=mask, other=0.0)
        sums = tl.dot(rows, gates, sums, input_precision="ieee")
        if GATED:
            ups = tl.load(weight_place + OUT * IN + (start + item)[:, None], mask=mask, other=0.0)
            up_sums = tl.dot(rows, ups, up_sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + expert * parts * OUT + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias + (expert * 2 + 1) * OUT + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    place = out + pair[:, None] * OUT + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    outputs,
    ids,
    weights,
    out,
    first_expert,
    EXPERTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: up to BLOCK columns of one token."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        expert = tl.load(ids + pair) - first_expert
        is_here = (expert >= 0) & (expert < EXPERTS)
        output = tl.load(outputs + pair * WIDTH + column, mask=inside & is_here, other=0.0).to(tl.float32)
        total += output * tl.load(weights + pair)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def add_gated_kernel(  # type: ignore[no-untyped-def]
    total,
    x,
    gates,
    stride,
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: up to BLOCK columns of one token."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = 1.0 / (1.0 + tl.exp(-tl.load(gates + token * stride).to(tl.float32)))
    place = token * WIDTH + column
    added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * gate
    added += tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, added.to(total.dtype.element_ty), mask=inside)


class TritonExperts:
    """``kernels.experts.mix_experts`` of ``weights``; shapes follow from the number of tokens alone.

    ``tiles`` replaces the choice from ``TILES``, and ``grouped_mm_from`` replaces ``GROUPED_MM_FROM``.
    """

    is_recordable = True

    def __init__(self, weights: ExpertWeights, tiles: Tiles | None = None, grouped_mm_from: int | None = None) -> None:
        self._weights, self._tiles = weights, tiles
        if grouped_mm_from is None and _takes_grouped_mm(weights):
            grouped_mm_from = GROUPED_MM_FROM
        self._grouped_mm_from = math.inf if grouped_mm_from is None else grouped_mm_from * len(weights.down)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``mix_experts``."""
        experts, (num_tokens, top_k) = self._weights, expert_ids.shape
        num_experts, hidden, inner = experts.down.shape
        out = torch.empty_like(x)
        if not num_tokens:
            return out
        assert x.is_contiguous(), x.stride()
        num_pairs, pdl = num_tokens * top_k, dependent_launch(x.device)
        if num_pairs >= self._grouped_mm_from:
            outputs = self._multiply_at_once(x, expert_ids)
        else:
            tiles = self._tiles or tiles_for(num_pairs, num_experts)
            sorted_pairs, block_experts = self._sort(expert_ids, tiles.block_m, pdl)
            order = (sorted_pairs, block_experts, num_pairs)
            inner_rows = x.new_empty((num_pairs, inner))
            self._multiply(
                x, experts.gate_up, experts.gate_up_bias, inner_rows, order, tiles, top_k, pdl, is_gated=True
            )
            outputs = x.new_empty((num_pairs, hidden))
            self._multiply(inner_rows, experts.down, experts.down_bias, outputs, order, tiles, 1, pdl, is_gated=False)
        block = min(triton.next_power_of_2(hidden), _COLUMNS)
        sum_kernel[(num_tokens, ceil_div(hidden, block))](
            outputs,
            expert_ids,
            weights,
            out,
            experts.first,
            EXPERTS=num_experts,
            WIDTH=hidden,
            TOP_K=top_k,
            BLOCK=block,
            **pdl,
        )
        return out

    def _multiply_at_once(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Each pair's output (pairs, hidden), by PyTorch's grouped products of the sorted pairs; nothing waits for the
        device.  Outputs of pairs whose expert is elsewhere are undefined."""
        experts, num_experts = self._weights, len(self._weights.down)
        local = (expert_ids.flatten() - experts.first).long()
        local = torch.where((local < 0) | (local >= num_experts), num_experts, local)
        found = local.sort(stable=True)
        numbers = torch.arange(num_experts, device=x.device)
        ends = torch.searchsorted(found.values, numbers, right=True).to(torch.int32)
        rows = x[found.indices // expert_ids.shape[1]]
        both = F.grouped_mm(rows, experts.gate_up.transpose(1, 2), offs=ends)
        inner = gate_triton(both, experts.activation)
        outputs = F.grouped_mm(inner, experts.down.transpose(1, 2), offs=ends)
        return torch.empty_like(outputs).index_copy_(0, found.indices, outputs)

    def _sort(self, expert_ids: torch.Tensor, block_m: int, pdl: dict[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sorted pairs, and the expert of each block."""
        num_experts, first, num_pairs = len(self._weights.down), self._weights.first, expert_ids.numel()
        num_blocks = num_pairs // block_m + min(num_experts, num_pairs)
        counts = expert_ids.new_empty(num_experts)
        sorted_pairs, block_experts = expert_ids.new_empty(num_blocks * block_m), expert_ids.new_empty(num_blocks)
        count_kernel[(num_experts,)](expert_ids, counts, num_pairs, first, SCAN=_SCAN, **pdl)
        sort_kernel[(num_experts,)](
            expert_ids,
            counts,
            sorted_pairs,
            block_experts,
            num_pairs,
            num_blocks,
            first,
            EXPERTS=num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_M=block_m,
            SCAN=_SCAN,
            **pdl,
        )
        return sorted_pairs, block_experts

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        order: tuple[torch.Tensor, torch.Tensor, int],
        tiles: Tiles,
        pairs_per_row: int,
        pdl: dict[str, bool],
        *,
        is_gated: bool,
    ) -> None:
        """``out`` (pairs, size) = each pair's row of ``x`` times its expert's ``weight``."""
        constants: dict[str, Any] = activation_constants(self._weights.activation if is_gated else None)
        sorted_pairs, block_experts, num_pairs = order
        size = out.shape[1]
        grouped_kernel[(len(block_experts), ceil_div(size, tiles.block_n))](
            x,
            weight,
            bias,
            out,
            sorted_pairs,
            block_experts,
            num_pairs,
            IN=weight.shape[2],
            OUT=size,
            PAIRS_PER_ROW=pairs_per_row,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            GATED=is_gated,
            HAS_BIAS=bias is not None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **constants,
            **pdl,
        )


def _takes_grouped_mm(weights: ExpertWeights) -> bool:
    """Whether the GPU's grouped product takes these experts."""
    down = weights.down
    if down.device.type != "cuda" or down.dtype != torch.bfloat16 or weights.down_bias is not None:
        return False
    is_capable = torch.cuda.get_device_capability(down.device) >= _GROUPED_MM_CAPABILITY
    return is_capable and down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0  # rows of 16 bytes


def add_gated_triton(total: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
    """``experts.add_gated``."""
    num_tokens, width = x.shape
    assert total.is_contiguous() and x.is_contiguous(), (total.stride(), x.stride())
    if num_tokens:
        block = min(triton.next_power_of_2(width), _COLUMNS)
        grid = (num_tokens, ceil_div(width, block))
        add_gated_kernel[grid](total, x, gates, gates.stride(0), WIDTH=width, BLOCK=block, **dependent_launch(x.device))
