"""Attention over keys that are at hand: PyTorch's own function, or the plain formula of what that does not know."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionShape
from tp_engine.kernels import plain_attention


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    shape: AttentionShape,
    sinks: torch.Tensor | None,
    is_causal: bool = False,
) -> torch.Tensor:
    """``query`` (..., q, head_dim) over ``keys`` and ``values`` (..., k, head_dim) -> (..., q, head_dim).

    ``mask`` (..., q, k) is 0, or -inf where a key is hidden; ``is_causal`` stands for one, where there is neither a
    softcap nor sinks.  ``sinks`` (..., q or 1, 1) are the shape's, by the rows of ``query``.
    """
    if shape.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, scale=shape.scale)
    assert not is_causal
    return plain_attention.attend(query, keys, values, mask, scale=shape.scale, softcap=shape.softcap, sinks=sinks)


def sinks_by_kv_head(shape: AttentionShape) -> torch.Tensor | None:
    """The layer's sinks as (KV heads, queries per KV head), if it has any."""
    return None if shape.sinks is None else shape.sinks.view(shape.num_kv_heads, -1)
