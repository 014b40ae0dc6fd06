"""The experts of each token, one program a token, all in registers: the Triton twin of ``routing``."""

from typing import get_args

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.experts.routing import ExpertLoad
from tp_engine.kernels.jit import jit
from tp_engine.model_config.mlp import RouterScores, RoutingRule

# Indices in ``RouterScores``; 1 is "softmax_of_chosen".
_SOFTMAX, _SIGMOID = tl.constexpr(0), tl.constexpr(2)
_LOWEST = tl.constexpr(float("-inf"))


@jit
def take_largest(values, index, COUNT: tl.constexpr):
    """The first ``index`` with the largest of ``values``; COUNT - 1 if all are NaN."""
    return tl.minimum(tl.min(tl.where(values == tl.max(values, 0), index, COUNT), 0), COUNT - 1)


@jit
def keep_groups(
    choice, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):
    """``choice`` with -inf outside of the TOP_GROUPS groups whose GROUP_BEST largest values have the largest sums."""
    size: tl.constexpr = EXPERTS // GROUPS
    group = expert // size
    worth = tl.full(choice.shape, _LOWEST, tl.float32)  # of an expert's group
    for index in tl.static_range(GROUPS):
        own = tl.where(group == index, choice, _LOWEST)
        first = take_largest(own, expert, EXPERTS)
        total = tl.max(own, 0)
        if size > 1 and GROUP_BEST > 1:
            total += tl.max(tl.where(expert == first, _LOWEST, own), 0)
        worth = tl.where(group == index, total, worth)
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = take_largest(tl.where(kept, _LOWEST, worth), expert, EXPERTS) // size
        kept = kept | (group == best)
    return tl.where(kept, choice, _LOWEST)


@jit
def route_kernel(
    logits, stride, correction, expert_scale, ids, weights, counts, slots, sum_eps, factor,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr,
    RENORMALISES: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_LOAD: tl.constexpr, HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token."""
    let_next_begin(PDL)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    scores = tl.load(logits + token * stride + expert, mask=inside, other=_LOWEST).to(tl.float32)
    if SCORES == _SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORES == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, _LOWEST)
    if GROUPS > 1:
        choice = keep_groups(choice, expert, EXPERTS, GROUPS, TOP_GROUPS, GROUP_BEST)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.full((BLOCK_K,), _LOWEST, tl.float32)
    taken = expert < 0
    for index in tl.static_range(TOP_K):
        best = take_largest(tl.where(taken, _LOWEST, choice), expert, EXPERTS)
        taken = taken | (expert == best)
        chosen = tl.where(place == index, best, chosen)
        weight = tl.where(place == index, tl.sum(tl.where(expert == best, scores, 0.0), 0), weight)
    if SCORES == 1:
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    weight = tl.where(place < TOP_K, weight, 0.0)
    if RENORMALISES:
        weight = weight / (tl.sum(weight, 0) + sum_eps)
    if HAS_LOAD:
        is_counted = tl.load(slots + token) >= 0
        tl.atomic_add(counts + chosen, 1, mask=(place < TOP_K) & is_counted)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    weight *= factor
    if HAS_SCALE:
        weight *= tl.load(expert_scale + chosen, mask=place < TOP_K, other=0.0)
    tl.store(weights + token * TOP_K + place, weight, mask=place < TOP_K)


def route_triton(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None,
    load: ExpertLoad | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``routing.route``; the rows may be slices of wider ones."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits, logits.stride(0), correction, expert_scale, ids, weights, None if load is None else load.counts,
            None if load is None else load.slots, float(rule.sum_eps), float(rule.factor),
            EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts), TOP_K=rule.top_k,
            BLOCK_K=triton.next_power_of_2(rule.top_k), SCORES=get_args(RouterScores).index(rule.scores),
            RENORMALISES=rule.renormalises, GROUPS=rule.num_groups, TOP_GROUPS=rule.top_groups,
            GROUP_BEST=rule.group_best, HAS_CORRECTION=correction is not None, HAS_LOAD=load is not None,
            HAS_SCALE=expert_scale is not None, **dependent_launch(logits.device),
        )  # fmt: skip
    return ids, weights
