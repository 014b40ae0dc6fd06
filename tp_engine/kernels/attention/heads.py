"""Norm and rotation of queries and keys, in plain PyTorch: the twins of ``heads_triton`` and ``head_width_triton``.

The heads of a token come as the merged projection leaves them, and are normalised (Qwen3; in Gemma 4 values too) and
rotated (https://arxiv.org/abs/2104.09864, in the half-split order of transformers' Llama)::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]
                                      norm, rotate           kept, or norm

A partial rotation rotates the first ``rotary_dim`` elements of a head, half-split among themselves.

Some models normalise all queries of a token together, and all keys.  These may lie on several ranks, so it takes two
operations: each rank adds up its squares, and with the sums of all ranks each normalises its own heads::

    squares (N, 2)                = [ sum over a token's queries | sum over its keys ]

    x / sqrt(squares / width + eps) * weight        width: elements of all queries, or of all keys, on all ranks
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import widened

# Query, key and value; the last two are None if they are in the cache already.
Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadNorm:
    """RMS normalisation of single heads: ``q_weight`` and ``k_weight`` (head_dim,); ``weights`` (H + KV, head_dim)
    repeats them for every head; ``offset`` is added to them.  If it ``includes_values``, ``weights`` has rows for the
    value heads too, (H + 2 KV, head_dim), which with the offset are 1."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    weights: torch.Tensor
    eps: float
    offset: float = 0.0
    includes_values: bool = False


class Rotation:
    """The rotation of one step's tokens; all layers of a kind share it.

    ``table`` (max_model_len, rotary_dim): cosines of a position's pairs, then their sines; ``rotary_dim`` is even and
    at most head_dim, 0 where only queries are scaled.  ``positions`` (N,) int64.  Queries are multiplied by
    ``query_scale`` (max_model_len,) float32 at their position, if it is given.
    """

    __slots__ = ("_cos_sin", "positions", "query_scale", "table")

    def __init__(self, table: torch.Tensor, positions: torch.Tensor, query_scale: torch.Tensor | None = None) -> None:
        self.table, self.positions, self.query_scale = table, positions, query_scale
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.table.shape[1]

    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each (N, 1, rotary_dim), as ``apply_rotary`` takes them; looked up once."""
        if self._cos_sin is None:
            cos, sin = self.table.index_select(0, self.positions).unsqueeze(1).chunk(2, -1)
            self._cos_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos_sin


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` (N, heads, head_dim): element i of a head's first half is paired with element i of its second.

    ::

        (a, b) -> (a cos - b sin, b cos + a sin) = (a, b) * (cos, cos) + (b, a) * (-sin, sin)
    """
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, -1), sin)


def norm_heads(heads: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    """``heads`` (N, heads, head_dim), normalised all at once, then multiplied by the weights of each head."""
    if norm.offset == 0.0:
        return F.rms_norm(heads, heads.shape[-1:], None, norm.eps).mul_(norm.weights)
    scaled = F.rms_norm(widened(heads), heads.shape[-1:], None, norm.eps)
    return scaled.mul_(widened(norm.weights) + norm.offset).to(heads.dtype)


def rotate_heads(heads: torch.Tensor, num_heads: int, rotation: Rotation) -> torch.Tensor:
    """``heads`` (N, H + KV, head_dim), queries then keys: rotate both, and scale the ``num_heads`` queries."""
    size = rotation.rotary_dim
    if size == heads.shape[-1]:
        rotated = apply_rotary(heads, *rotation.cos_sin())
    elif size:
        rotated = torch.cat((apply_rotary(heads[..., :size], *rotation.cos_sin()), heads[..., size:]), -1)
    else:
        rotated = heads
    if rotation.query_scale is None:
        return rotated
    scale = rotation.query_scale.index_select(0, rotation.positions).view(-1, 1, 1)
    queries = (rotated[:, :num_heads] * scale).to(heads.dtype)
    return torch.cat((queries, rotated[:, num_heads:]), 1)


def qk_norm_rope_store(
    heads: torch.Tensor,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> Heads:
    """``heads`` (N, H + 2 KV, head_dim) -> query (N, H, head_dim), key and value (N, KV, head_dim).

    Without a ``rotation`` nothing is rotated.  This twin leaves the store to the attention backend; others may
    store K/V at the slots ``slot_mapping`` (N,) int64 of ``kv``, if there is one, and then return None for both.  They
    may overwrite ``heads``.
    """
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    own, values = heads[:, :num_rotated], heads[:, num_rotated:]
    if norm is not None and norm.includes_values:
        normed = norm_heads(heads, norm)
        own, values = normed[:, :num_rotated], normed[:, num_rotated:]
    elif norm is not None:
        own = norm_heads(own, norm)
    if rotation is not None:
        own = rotate_heads(own, num_heads, rotation)
    return own[:, :num_heads], own[:, num_heads:], values


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
    """Normalise the queries and keys of ``heads``, in place; values stay as they are.

    ``squares`` (N, 2) float32, summed over all ranks; ``weights`` (H + KV, head_dim); ``widths``: of queries, of keys.
    """
    for column, (first, end) in enumerate(((0, num_heads), (num_heads, num_heads + num_kv_heads))):
        own = heads[:, first:end]
        factor = (squares[:, column] / widths[column] + eps).rsqrt().view(-1, 1, 1)
        own.copy_(widened(own) * factor * widened(weights[first:end]))
