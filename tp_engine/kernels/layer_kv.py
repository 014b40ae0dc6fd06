"""Keys and values: those of one step, and one layer's cache of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class KeyValue(NamedTuple):
    """A step's new keys and values of one layer, each (N, KV heads, head_dim)."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """One layer's paged cache (2, blocks, block_size, KV heads, head_dim): keys at 0, values at 1.

    ``scales`` (2, blocks, KV heads, block_size) float32 belong to a quantised cache (kv_quant.py).
    """

    cache: torch.Tensor
    scales: torch.Tensor | None = None
