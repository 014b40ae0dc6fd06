"""Paged attention with Triton kernels; only storing K/V has its kernel so far, the rest is the torch backend's."""

from __future__ import annotations

import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.attention.needs import AttentionNeeds
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.kernels.triton_support import has_triton


class TritonBackend(TorchBackend):
    """Stores by one kernel launch, without waiting for the device."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        from tp_engine.kernels.store_kv_triton import store_kv_triton

        self._store_kernel = store_kv_triton

    def _prepare_store(self, metadata: AttentionMetadata) -> None:
        """Nothing: the kernel skips padding by itself."""

    def _store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        kv_scales: torch.Tensor | None,
    ) -> None:
        self._store_kernel(key, value, kv_cache, metadata.slot_mapping)


def why_not(needs: AttentionNeeds) -> str | None:
    """What keeps this backend from being used, with the remedy; None if it can be used."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if not has_triton():
        return "the triton package is not installed; `pip install triton`, or use attention_backend=torch"
    return None
