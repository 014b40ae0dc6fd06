"""Which experts a token goes to, and with which weights, in plain PyTorch: the twin of ``routing_triton``.

::

    s_e      score of expert e: softmax of the logits, sigmoid of its own, sqrt(softplus(own)), or the logit itself
    c_e      s_e + correction_e, for the choice alone; -inf outside of the chosen groups
    chosen   the top_k experts with the largest c, in that order; among equals, lower ids first; or as given
    w_j      s of the j-th chosen expert; if s are logits, their softmax over the chosen ones
             / (sum of w + sum_eps), if the rule renormalises; * factor; * the expert's own scale

A group is num_experts / num_groups consecutive experts; its score is the sum of its two largest c (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.1.2), or its largest (DeepSeek-V2).  All arithmetic is float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.model_config.mlp import RoutingRule


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """``counts`` (experts,) int64: the tokens that went to each expert, but not padding, whose ``slots`` (N,) is -1."""

    counts: torch.Tensor
    slots: torch.Tensor


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None,
    load: ExpertLoad | None = None,
    expert_scale: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` (N, experts) -> expert ids (N, k) int32, weights (N, k) float32.

    ``correction`` and ``expert_scale`` are (experts,) float32; ``given`` (N, k) int64 are the experts of tokens that
    have a fixed choice, which only the twin takes, as it alone has ``sqrt_softplus``.  Adds the tokens of this step to
    ``load``.
    """
    scores, choice = score(logits, rule, correction)
    chosen = _largest(choice, rule.top_k) if given is None else given
    weights = scores.gather(1, chosen)
    if rule.scores == "softmax_of_chosen":
        weights = weights.softmax(1)
    if rule.renormalises:
        weights = weights / (weights.sum(1, keepdim=True) + rule.sum_eps)
    if load is not None:
        is_counted = (load.slots >= 0).to(torch.int64).unsqueeze(1).expand_as(chosen)
        load.counts.scatter_add_(0, chosen.flatten(), is_counted.flatten())
    weights = weights * rule.factor
    return chosen.to(torch.int32), weights if expert_scale is None else weights * expert_scale[chosen]


def score(
    logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert's score, and the score that decides the choice, both (N, experts) float32."""
    scores = logits.float()
    if rule.scores == "softmax":
        scores = scores.softmax(1)
    elif rule.scores == "sigmoid":
        scores = scores.sigmoid()
    elif rule.scores == "sqrt_softplus":
        scores = F.softplus(scores).sqrt()
    choice = scores if correction is None else scores + correction
    return scores, choice if rule.num_groups == 1 else _within_groups(choice, rule)


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """``x`` (N, width) in float32."""
    return x.float()


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places (N, count) of each row's largest values; among equals, the first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_groups(choice: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """``choice`` (N, experts) with -inf outside of the best groups."""
    groups = choice.view(len(choice), rule.num_groups, -1)
    worth = groups.topk(min(rule.group_best, groups.shape[2]), 2).values.sum(2)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _largest(worth, rule.top_groups), True)
    return groups.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
