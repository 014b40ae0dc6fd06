"""Paged attention through the flash-attn package (https://github.com/Dao-AILab/flash-attention).

Two packages have the name: ``flash_attn`` is version 2, ``flash_attn_interface`` version 3, which is for Hopper GPUs,
takes blocks of any size, and is preferred where it is installed.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op

BLOCK_SIZE_MULTIPLE = 256
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
MIN_CAPABILITY = (8, 0)
_HOPPER = 9

Rule: TypeAlias = dict[str, Any]
"""The arguments that follow from a layer's shape, by the package's names; both calls take them."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """The first D requests of the batch, one query each."""

    seq_lens: torch.Tensor  # (D,) int32, all their computed tokens
    block_table: torch.Tensor  # (D, M) int32


@dataclass(frozen=True, slots=True)
class Prefills:
    """The part of the batch after the decodes: P requests, T tokens."""

    cu_seqlens_q: torch.Tensor  # (P + 1,) int32, where each request's queries start, from 0
    seq_lens: torch.Tensor  # (P,) int32, all its computed tokens
    cu_seqlens_k: torch.Tensor  # (P + 1,) int32, their sums
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor  # (P, M) int32
    num_tokens: int


class FlashAttn2:
    """The calls of version 2; ``package`` is the module.

    ``decode``: ``query`` (D, 1, heads, head_dim), the output likewise.  ``prefill``: ``query`` (T, heads, head_dim);
    causal from the lower right: a request's last query sees its last key.  ``rule`` holds the arguments that both take.
    """

    module, table = "flash_attn", "block_table"  # the latter is the argument's name

    def __init__(self, package: Any = None) -> None:
        self._package = package or import_module(self.module)

    def decode(self, query: torch.Tensor, kv_cache: torch.Tensor, decodes: Decodes, rule: Rule) -> torch.Tensor:
        """Attend with the one query of each request."""
        lengths = {"cache_seqlens": decodes.seq_lens, self.table: decodes.block_table}
        out: torch.Tensor = self._package.flash_attn_with_kvcache(query, *kv_cache, **lengths, **rule)
        return out

    def prefill(self, query: torch.Tensor, kv_cache: torch.Tensor, prefills: Prefills, rule: Rule) -> torch.Tensor:
        """Attend with the queries of all requests, packed."""
        out: torch.Tensor = self._package.flash_attn_varlen_func(
            query,
            *kv_cache,
            cu_seqlens_q=prefills.cu_seqlens_q,
            cu_seqlens_k=prefills.cu_seqlens_k,
            max_seqlen_q=prefills.max_seqlen_q,
            max_seqlen_k=prefills.max_seqlen_k,
            block_table=prefills.block_table,
            **rule,
        )
        return out


class FlashAttn3(FlashAttn2):
    """The same calls of version 3, whose ``flash_attn_with_kvcache`` also takes packed queries."""

    module, table = "flash_attn_interface", "page_table"

    def prefill(self, query: torch.Tensor, kv_cache: torch.Tensor, prefills: Prefills, rule: Rule) -> torch.Tensor:
        out: torch.Tensor = self._package.flash_attn_with_kvcache(
            query,
            *kv_cache,
            cache_seqlens=prefills.seq_lens,
            page_table=prefills.block_table,
            cu_seqlens_q=prefills.cu_seqlens_q,
            max_seqlen_q=prefills.max_seqlen_q,
            **rule,
        )
        return out


class FlashAttnBackend:
    """Decodes and prefills by one call each; both read the paged cache, chunks and cached prefixes included."""

    name = "flash_attn"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self, calls: FlashAttn2) -> None:
        self._calls = calls
        self._prefills: Prefills | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Compute the cumulative lengths of the prefills; see ``AttentionBackend``."""
        self._prefills = None
        first = metadata.num_decodes
        if first == metadata.num_requests:
            return
        seq_lens = metadata.seq_lens[first:]
        cu_seqlens_k = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        self._prefills = Prefills(
            cu_seqlens_q=metadata.query_start[first:] - metadata.query_start[first],
            seq_lens=seq_lens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=int(metadata.host_query_lens[first:].max()),
            max_seqlen_k=int(metadata.host_seq_lens[first:].max()),
            block_table=metadata.block_table[first:],
            num_tokens=int(metadata.host_query_lens[first:].sum()),
        )

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        assert kv.scales is None and shape.sinks is None, "why_not refuses a quantised cache, and sinks"
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        parts, start, rule = [], metadata.num_decodes, _rule_of(shape)
        if start:
            decodes = Decodes(metadata.seq_lens[:start], metadata.block_table[:start])
            parts.append(self._calls.decode(query[:start].unsqueeze(1), kv.cache, decodes, rule).squeeze(1))
        if self._prefills is not None:
            end = start + self._prefills.num_tokens
            parts.append(self._calls.prefill(query[start:end], kv.cache, self._prefills, rule))
            start = end
        if start < len(query):
            parts.append(torch.zeros_like(query[start:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rule_of(shape: AttentionShape) -> Rule:
    """The window counts keys to the left and right of the query's own key, -1: no limit; a softcap of 0 is none."""
    window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
    return {"softmax_scale": shape.scale, "causal": True, "window_size": window, "softcap": shape.softcap or 0.0}


def best_version(needs: AttentionNeeds) -> int | None:
    """Return the best installed version that runs on this GPU, 3 or 2; None if there is none."""
    is_hopper = needs.capability is None or needs.capability[0] == _HOPPER
    if is_hopper and find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if find_spec("flash_attn") is not None else None


def make_backend(needs: AttentionNeeds) -> FlashAttnBackend:
    """Return a backend with the best version of the package."""
    return FlashAttnBackend(FlashAttn3() if best_version(needs) == 3 else FlashAttn2())


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend can not be used, with the remedy; None if it can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    version = best_version(needs)
    if version is None:
        return "the flash-attn package is not installed; `pip install flash-attn`, or use another attention_backend"
    if version == 2 and needs.block_size % BLOCK_SIZE_MULTIPLE:
        return f"block_size is {needs.block_size}; it needs a multiple of {BLOCK_SIZE_MULTIPLE}: set block_size=256"
    return needs.why_too_old(MIN_CAPABILITY) or needs.why_no_sinks() or _why_not_these_types(needs)


def _why_not_these_types(needs: AttentionNeeds) -> str | None:
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {needs.dtype}; set dtype, or use another attention_backend"
    if needs.kv_cache_dtype != needs.dtype:
        return (
            f"kv_cache_dtype is {needs.kv_cache_dtype} but dtype is {needs.dtype}; it needs both equal: set "
            f"kv_cache_dtype=auto, or use attention_backend=triton"
        )
    odd = [size for size in needs.head_dims if size > MAX_HEAD_DIM or size % HEAD_DIM_MULTIPLE]
    if odd:
        return (
            f"head_dim is {odd[0]}; it needs a multiple of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM}: use "
            f"another attention_backend"
        )
    return None
