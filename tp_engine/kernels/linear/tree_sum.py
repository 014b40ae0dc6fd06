"""Sums that are bitwise equal on 1, 2, 4 and 8 ranks: the rule of ``tp_invariant``, and its twins in PyTorch.

::

    columns of a row-parallel product     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     NUM_SHARDS shards, each with its own sum
    added in float32                      ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    on 2 ranks                            (      rank 0      ) + (      rank 1      )

For each number of ranks that divides ``NUM_SHARDS``, a rank has a whole subtree, and the all-reduce is the rest of the
tree.  Sums are rounded once.  A bias belongs to shard 0.  The tree is that of TBIK (https://arxiv.org/abs/2511.17826).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``parts``, float32, as a balanced tree; a part without a partner waits for the next level."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, parts[-1]] if len(parts) % 2 else pairs
    return parts[0]


def tree_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_shards: int, *, keeps_sums: bool
) -> torch.Tensor:
    """``x @ weight.T + bias``, (N, in), (out, in), (out,) -> (N, out), of ``x``'s type; float32 if it ``keeps_sums``.

    The order of the tree is that of C and Triton, but the order within a shard may differ.
    """
    columns = zip(x.float().chunk(num_shards, 1), weight.float().chunk(num_shards, 1), strict=True)
    first, *others = [rows @ part.t() for rows, part in columns]
    total = tree_sum([first if bias is None else first + bias.float(), *others])
    return total if keeps_sums else total.to(x.dtype)


def mix_experts_tree(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights[torch.Tensor],
    num_shards: int,
    *,
    keeps_sums: bool,
) -> torch.Tensor:
    """``mix_experts`` by shards of the inner elements: each shard is a token's sum over its experts.

    The activation is rounded to the type of ``x``, as always, and the shards' products are not.
    """
    inner, num_parts = experts.down.shape[2] // num_shards, experts.activation.num_parts

    def of_shard(shard: int) -> torch.Tensor:
        own = slice(shard * inner, (shard + 1) * inner)

        def rows(stack: torch.Tensor) -> torch.Tensor:
            return torch.cat([part[:, own] for part in stack.chunk(num_parts, 1)], 1)

        part = replace(
            experts,
            gate_up=rows(experts.gate_up),
            down=experts.down[:, :, own],
            gate_up_bias=None if experts.gate_up_bias is None else rows(experts.gate_up_bias),
            down_bias=None if shard else experts.down_bias,
        )
        return mix_experts(x, expert_ids, weights, part, keeps_sums=True)

    total = tree_sum([of_shard(shard) for shard in range(num_shards)])
    return total if keeps_sums else total.to(x.dtype)
