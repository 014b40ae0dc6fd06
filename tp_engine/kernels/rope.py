"""Queries and keys made ready for attention, in plain PyTorch: the twin of ``rope_triton``.

The heads of a token come as the merged projection leaves them, and are normalised (Qwen3) and rotated
(https://arxiv.org/abs/2104.09864, in the half-split order of transformers' Llama)::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]
                                      norm, rotate           kept
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

# Query, and key and value unless they are in the cache already.
Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadNorm:
    """RMS normalisation of single heads: ``q_weight`` and ``k_weight`` (head_dim,); ``weights`` (H + KV, head_dim)
    repeats them for every head."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    weights: torch.Tensor
    eps: float


class Rotation:
    """How far the tokens of one step turn; all layers share it.

    ``table`` (max_model_len, head_dim): cosines of a position's pairs, then their sines; ``positions`` (N,) int64.
    """

    __slots__ = ("_cos_sin", "positions", "table")

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        self.table, self.positions = table, positions
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each (N, 1, head_dim), as ``apply_rotary`` takes them; looked up once."""
        if self._cos_sin is None:
            cos, sin = self.table.index_select(0, self.positions).unsqueeze(1).chunk(2, -1)
            self._cos_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos_sin


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` (N, heads, head_dim): element i of a head's first half turns with element i of its second.

    ::

        (a, b) -> (a cos - b sin, b cos + a sin) = (a, b) * (cos, cos) + (b, a) * (-sin, sin)
    """
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, -1), sin)


def norm_heads(heads: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    """``heads`` (N, H + KV, head_dim), queries then keys: normalise all at once, then multiply by a weight per head."""
    return F.rms_norm(heads, heads.shape[-1:], None, norm.eps).mul_(norm.weights)


def prepare_heads(
    heads: torch.Tensor,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation,
    kv_cache: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> Heads:
    """``heads`` (N, H + 2 KV, head_dim) -> query (N, H, head_dim), key and value (N, KV, head_dim).

    Nothing is stored here: the attention backend does that.  An implementation that stores K/V at the slots
    ``slot_mapping`` (N,) int64 of ``kv_cache`` (2, blocks, block_size, KV, head_dim), where there is one, returns None
    for both; ``kv_scales`` belongs to a quantised cache (kv_quant.py).  It may overwrite ``heads``.
    """
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    rotated = heads[:, :num_rotated]
    rotated = apply_rotary(rotated if norm is None else norm_heads(rotated, norm), *rotation.cos_sin())
    return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_rotated:]
