"""Paged attention through the flashinfer package (https://github.com/flashinfer-ai/flashinfer)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.flash_attn import why_not_these_types
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op
from tp_engine.plan import IntArray

HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20


class _LayerKind(NamedTuple):
    """What layers that share a plan have in common."""

    shape: AttentionShape
    block_size: int
    dtype: torch.dtype


class FlashInferBackend:
    """One call for the whole step, decodes as queries of length 1, planned on the host once per kind of layer.

    ``package`` is the flashinfer module, imported unless given.
    """

    name = "flashinfer"
    can_capture_decodes = False
    can_capture_prompts = False

    def __init__(self, package: Any = None) -> None:
        package = package or import_module("flashinfer")
        self._new_wrapper = package.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers: dict[_LayerKind, Any] = {}
        self._planned: set[_LayerKind] = set()
        self._num_tokens = 0

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Drop the last step's plans; the first layer of each kind makes a new one; see ``AttentionBackend``."""
        self._planned.clear()
        self._num_tokens = int(metadata.host_query_lens.sum())

    def forward(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        assert kv.scales is None and shape.sinks is None, "why_not refuses a quantised cache, and sinks"
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        kind = _LayerKind(shape, kv.cache.shape[2], query.dtype)
        wrapper = self._wrapper(kind, query.device)
        if kind not in self._planned:
            self._plan(wrapper, kind, metadata)
            self._planned.add(kind)
        out: torch.Tensor = wrapper.run(query[: self._num_tokens].contiguous(), (kv.cache[0], kv.cache[1]))
        num_padding = len(query) - self._num_tokens
        return torch.cat((out, torch.zeros_like(query[-num_padding:]))) if num_padding else out

    def _wrapper(self, kind: _LayerKind, device: torch.device) -> Any:
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper = self._wrappers[kind] = self._new_wrapper(workspace, "NHD")
        return wrapper

    def _plan(self, wrapper: Any, kind: _LayerKind, metadata: AttentionMetadata) -> None:
        """Plan a step: flashinfer takes lengths and sums on the host, block ids on the device."""
        shape, block_size = kind.shape, kind.block_size
        counts: IntArray = -(-metadata.host_seq_lens // block_size)
        last_page: IntArray = np.where(counts > 0, metadata.host_seq_lens - (counts - 1) * block_size, 0)
        wrapper.plan(
            qo_indptr=_sums(metadata.host_query_lens),
            paged_kv_indptr=_sums(counts),
            paged_kv_indices=_blocks_in_order(metadata.block_table, counts),
            paged_kv_last_page_len=torch.from_numpy(last_page.astype(np.int32)),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=block_size,
            causal=True,
            sm_scale=shape.scale,
            logits_soft_cap=shape.softcap,
            window_left=-1 if shape.sliding_window is None else shape.sliding_window - 1,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )


def _sums(lengths: IntArray) -> torch.Tensor:
    """Where each request begins and the last one ends: (B + 1,) int32 on the host."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return torch.from_numpy(sums)


def _blocks_in_order(block_table: torch.Tensor, counts: IntArray) -> torch.Tensor:
    """The first ``counts[b]`` (B,) blocks of each row b of the table, row after row, without waiting for the device."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    columns = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    places = torch.from_numpy(rows * block_table.shape[1] + columns)
    if block_table.device.type == "cuda":
        places = places.pin_memory()
    return block_table.reshape(-1).index_select(0, places.to(block_table.device, non_blocking=True))


def why_not(needs: AttentionNeeds) -> str | None:
    """Why this backend can not be used, with the remedy; None if it can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if find_spec("flashinfer") is None:
        return (
            "the flashinfer package is not installed; `pip install flashinfer-python`, or use another attention_backend"
        )
    if odd := [size for size in needs.head_dims if size not in HEAD_DIMS]:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"head_dim is {odd[0]}; it takes {sizes}: use another attention_backend"
    return needs.why_no_sinks() or why_not_these_types(needs)
