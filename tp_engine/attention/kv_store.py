"""Which function stores keys and values: one kernel launch where Triton can be used, else plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from tp_engine.kernels.layer_kv import KeyValue, LayerKv, store_kv
from tp_engine.kernels.ops import has_triton

# New keys and values, cache, slots; see ``store_kv``.
StoreKv: TypeAlias = Callable[[KeyValue, LayerKv, torch.Tensor], None]


def fastest_store() -> StoreKv:
    """Of this machine's device; the kernel does not wait for the device, ``store_kv`` does."""
    if not (has_triton() and torch.cuda.is_available()):
        return store_kv
    from tp_engine.kernels.store_kv_triton import store_kv_triton

    return store_kv_triton
