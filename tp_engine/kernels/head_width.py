"""Queries and keys normalised over all heads together, in plain PyTorch.

The heads may lie on several ranks, so it takes two operations: each rank adds up its squares, and with the ranks' sums
each normalises its own heads::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]
    squares (N, 2)                = [ sum over a token's queries | sum over its keys ]

    x / sqrt(squares / width + eps) * weight        width: elements of all queries, or of all keys, on all ranks
"""

from __future__ import annotations

import torch

from tp_engine.kernels.widening import widened


def head_squares(heads: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Sums of squares of a token's query elements and of its key elements: (N, 2) float32."""
    parts = heads[:, : num_heads + num_kv_heads].split_with_sizes((num_heads, num_kv_heads), 1)
    return torch.stack([widened(part).square().sum((1, 2)) for part in parts], 1)


def norm_width(
    heads: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    squares: torch.Tensor,
    weights: torch.Tensor,
    widths: tuple[int, int],
    eps: float,
) -> None:
    """Normalise the queries and keys of ``heads``, in place; values are left.

    ``squares`` (N, 2) float32, those of all ranks; ``weights`` (H + KV, head_dim); ``widths``: of queries, of keys.
    """
    for column, (first, end) in enumerate(((0, num_heads), (num_heads, num_heads + num_kv_heads))):
        own = heads[:, first:end]
        factor = (squares[:, column] / widths[column] + eps).rsqrt().view(-1, 1, 1)
        own.copy_(widened(own) * factor * widened(weights[first:end]))
