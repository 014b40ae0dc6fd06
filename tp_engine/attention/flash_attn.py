"""Paged attention through the flash-attn package (https://github.com/Dao-AILab/flash-attention).

It comes as two: ``flash_attn`` is version 2, ``flash_attn_interface`` version 3, which is for Hopper GPUs, takes blocks
of any size, and is preferred where it is installed.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op

BLOCK_SIZE_MULTIPLE = 256
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
MIN_CAPABILITY = (8, 0)
_HOPPER = 9
_MODULES = {2: "flash_attn", 3: "flash_attn_interface"}


class FlashAttnBackend:
    """Decodes and prefills by one call each; both read the paged cache, chunks and cached prefixes included.

    A prefill's causal mask is aligned to the bottom right: a request's last query sees its last key.  ``package`` is
    the module of ``version``, by default the installed one.
    """

    name = "flash_attn"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self, version: int, package: Any = None) -> None:
        self._package = package or import_module(_MODULES[version])
        self._version, self._table = version, "page_table" if version == 3 else "block_table"  # the argument's name
        self._prefills: dict[str, Any] = {}  # arguments; none if there are only decodes
        self._num_prefill_tokens = 0

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Compute the arguments of the prefills; see ``AttentionBackend``."""
        first, self._prefills = metadata.num_decodes, {}
        lengths, seq_lens = metadata.host_query_lens[first:], metadata.seq_lens[first:]
        self._num_prefill_tokens = int(lengths.sum())
        if not len(lengths):
            return
        self._prefills = {
            "cu_seqlens_q": metadata.query_start[first:] - metadata.query_start[first],
            "max_seqlen_q": int(lengths.max()),
            self._table: metadata.block_table[first:],
        }
        if self._version == 3:
            self._prefills["cache_seqlens"] = seq_lens
        else:
            ends = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
            torch.cumsum(seq_lens, 0, dtype=torch.int32, out=ends[1:])
            self._prefills |= {"cu_seqlens_k": ends, "max_seqlen_k": int(metadata.host_seq_lens[first:].max())}

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        assert kv.scales is None and shape.sinks is None, "why_not refuses a quantised cache, and sinks"
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        parts, end, rule = [], metadata.num_decodes, _rule_of(shape)
        if end:
            lengths = {"cache_seqlens": metadata.seq_lens[:end], self._table: metadata.block_table[:end]}
            decoded = self._package.flash_attn_with_kvcache(query[:end].unsqueeze(1), *kv.cache, **lengths, **rule)
            parts.append(decoded.squeeze(1))
        if self._prefills:
            # Version 3's takes packed queries, too.
            name = "flash_attn_with_kvcache" if self._version == 3 else "flash_attn_varlen_func"
            start, end = end, end + self._num_prefill_tokens
            parts.append(getattr(self._package, name)(query[start:end], *kv.cache, **self._prefills, **rule))
        if end < len(query):
            parts.append(torch.zeros_like(query[end:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rule_of(shape: AttentionShape) -> dict[str, Any]:
    """The arguments of both calls that follow from a layer's shape: the window counts keys to the left and to the right
    of the query's own key, -1 for no limit; a softcap of 0 is none."""
    window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
    return {"softmax_scale": shape.scale, "causal": True, "window_size": window, "softcap": shape.softcap or 0.0}


def best_version(needs: AttentionNeeds) -> int | None:
    """The best installed version that runs on this GPU, 3 or 2; None if there is none."""
    is_hopper = needs.capability is None or needs.capability[0] == _HOPPER
    if is_hopper and find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if find_spec("flash_attn") is not None else None


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
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
