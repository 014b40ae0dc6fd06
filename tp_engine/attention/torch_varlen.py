"""Paged attention through PyTorch's own ``varlen_attn``, if the installed version takes a block table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.flash_attn import BLOCK_SIZE_MULTIPLE, MIN_CAPABILITY, why_not_these_types
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op

_NEEDED = ("window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")


class TorchVarlenBackend:
    """One call for the whole step, decodes as queries of length 1.

    The keys are never split over programs, so a request's output does not depend on the rest of the batch.
    ``varlen_attn`` is PyTorch's function unless given.
    """

    name = "torch_varlen"
    can_capture_decodes = False
    can_capture_prompts = False

    def __init__(self, varlen_attn: Callable[..., Any] | None = None) -> None:
        found = varlen_attn or paged_varlen_attn()
        assert found is not None, "why_not comes first"
        self._varlen_attn = found
        self._cu_seqlens_k = torch.empty(0)
        self._num_tokens = self._max_seqlen_q = self._max_seqlen_k = 0

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Compute the cumulative lengths; see ``AttentionBackend``."""
        seq_lens = metadata.seq_lens
        self._cu_seqlens_k = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=self._cu_seqlens_k[1:])
        self._num_tokens = int(metadata.host_query_lens.sum())
        self._max_seqlen_q = int(metadata.host_query_lens.max(initial=0))
        self._max_seqlen_k = int(metadata.host_seq_lens.max(initial=0))

    def forward(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        assert kv.scales is None, "why_not refuses a quantised cache"
        assert shape.softcap is None and shape.sinks is None, "why_not refuses both"
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        out: torch.Tensor = self._varlen_attn(
            query[: self._num_tokens],
            kv.cache[0],
            kv.cache[1],
            metadata.query_start,
            self._cu_seqlens_k,
            self._max_seqlen_q,
            self._max_seqlen_k,
            scale=shape.scale,
            window_size=(-1 if shape.sliding_window is None else shape.sliding_window - 1, 0),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            num_splits=1,
        )
        num_padding = len(query) - self._num_tokens
        return torch.cat((out, torch.zeros_like(query[-num_padding:]))) if num_padding else out


@cache
def paged_varlen_attn() -> Callable[..., Any] | None:
    """PyTorch's function, if it exists and takes all arguments of ``_NEEDED``."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    accepted = inspect.signature(varlen_attn).parameters
    return varlen_attn if all(name in accepted for name in _NEEDED) else None


def _has_version_3() -> bool:
    """Whether the user has told PyTorch to use flash attention 3 or later, which takes blocks of any size."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() is not None


def why_not(needs: AttentionNeeds) -> str | None:
    """Why this backend can not be used, with the remedy; None if it can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if paged_varlen_attn() is None:
        return (
            f"varlen_attn of PyTorch {torch.__version__} takes no block table; install a later one, or use another "
            f"attention_backend"
        )
    if needs.block_size % BLOCK_SIZE_MULTIPLE and not _has_version_3():
        return f"block_size is {needs.block_size}; it needs a multiple of {BLOCK_SIZE_MULTIPLE}: set block_size=256"
    if needs.has_softcap:
        return "the model caps its attention scores, which varlen_attn does not; use another attention_backend"
    return needs.why_too_old(MIN_CAPABILITY) or needs.why_no_sinks() or why_not_these_types(needs)
