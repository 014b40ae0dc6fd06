"""Pairs of a token and one of its experts, sorted by expert and padded to whole blocks, on the device.

::

    pair            token * top_k + j, of the token's j-th expert
    sorted pairs    expert 0's pairs, padded to whole blocks of BLOCK_M, then expert 1's ...; padding is `num_pairs`
    block expert    the expert of each block of BLOCK_M places, -1 after the last one

    count           program e: how many pairs go to expert e
    sort            program e: where its blocks begin (all counts before), its pairs there, in their order

There is room for the most blocks that the number of tokens can need; the actual number stays on the device, so the host
never waits.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch

_SCAN = 1024


class PairOrder(NamedTuple):
    """Sorted pairs (blocks * BLOCK_M,) and experts of blocks (blocks,), both int32, and the number of pairs."""

    sorted_pairs: torch.Tensor
    block_experts: torch.Tensor
    num_pairs: int


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
@no_type_check
def count_kernel(ids, counts, num_pairs, first_expert, SCAN: tl.constexpr, PDL: tl.constexpr):
    """One program: the pairs of one expert."""
    begin_program(PDL)
    expert = tl.program_id(0)
    offset = tl.arange(0, SCAN)
    total = tl.zeros((SCAN,), tl.int32)
    for start in range(0, num_pairs, SCAN):
        found = tl.load(ids + start + offset, mask=start + offset < num_pairs, other=-1)
        total += (found == expert + first_expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "first_expert"])
@no_type_check
def sort_kernel(
    ids, counts, sorted_pairs, block_experts, num_pairs, num_blocks, first_expert,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the places of one expert's pairs, and its blocks; the last one also marks unused blocks."""
    begin_program(PDL)
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


def sort_pairs(expert_ids: torch.Tensor, first: int, num_experts: int, block_m: int) -> PairOrder:
    """The pairs of ``expert_ids`` (N, k) int32 whose experts are among the ``num_experts`` from ``first`` on."""
    num_pairs, pdl = expert_ids.numel(), dependent_launch(expert_ids.device)
    num_blocks = num_pairs // block_m + min(num_experts, num_pairs)
    counts = expert_ids.new_empty(num_experts)
    sorted_pairs, block_experts = expert_ids.new_empty(num_blocks * block_m), expert_ids.new_empty(num_blocks)
    count_kernel[(num_experts,)](expert_ids, counts, num_pairs, first, SCAN=_SCAN, **pdl)
    sort_kernel[(num_experts,)](
        expert_ids, counts, sorted_pairs, block_experts, num_pairs, num_blocks, first,
        EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=block_m, SCAN=_SCAN, **pdl,
    )  # fmt: skip
    return PairOrder(sorted_pairs, block_experts, num_pairs)
