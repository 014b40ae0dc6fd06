"""Paged attention with Triton kernels: decodes split over their keys, prompt chunks tile by tile."""

from functools import cache, partial

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import has_triton

MIN_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 512
# For Triton's interpreter, which has no GPU to ask.
_INTERPRETED_MULTIPROCESSORS = 4


class TritonBackend:
    """Stores, decodes and prefills in a kernel launch each; nothing waits for the device.

    If it ``is_invariant``, a decode's keys are split by its length alone.
    """

    name = "triton"
    can_capture_decodes = True
    can_capture_prompts = True

    def __init__(self, *, is_invariant: bool = False) -> None:
        from tp_engine.kernels.attention import paged_decode_triton, paged_prefill_triton
        from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

        self._store_kv = store_kv_triton
        self._decode = paged_decode_triton.paged_decode_triton
        self._decode_sizes = cache(partial(paged_decode_triton.decode_sizes, is_fixed=is_invariant))
        self._prefill = paged_prefill_triton.paged_prefill_triton
        self._prefill_sizes = cache(paged_prefill_triton.prefill_sizes)
        self._max_arrivals = paged_decode_triton.MAX_ARRIVALS * (
            paged_decode_triton.FIXED_SPLITS if is_invariant else 1
        )
        self._arrivals: torch.Tensor | None = None
        self._num_prefill_tokens = 0
        self._decode_tables = (
            torch.empty(0, dtype=torch.float32, device="cpu"),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Find where the decodes end; see ``AttentionBackend``."""
        first = metadata.num_decodes
        self._num_prefill_tokens = int(metadata.host_query_lens[first:].sum())
        self._decode_tables = (metadata.block_table[:first], metadata.seq_lens[:first])

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if new is not None:
            self._store_kv(new, kv, metadata.slot_mapping)
        has_padding = metadata.is_padded and self._num_prefill_tokens > 0  # only the device knows behind which chunk
        num_decodes = metadata.num_decodes
        out = (torch.zeros if has_padding else torch.empty)(query.shape, dtype=query.dtype, device=query.device)
        if num_decodes:
            self._attend_decodes(query[:num_decodes], kv, out[:num_decodes], shape)
        if self._num_prefill_tokens:
            self._prefill(
                query, kv, metadata.block_table, metadata.seq_lens, metadata.query_start, out,
                scale=shape.scale,
                sizes=self._prefill_sizes(shape.head_dim, query.dtype.itemsize, _shared_memory(query.device)),
                num_queries=self._num_prefill_tokens, first_request=num_decodes, window=shape.sliding_window,
                softcap=shape.softcap, sinks=shape.sinks,
            )  # fmt: skip
        if num_decodes + self._num_prefill_tokens < len(query):
            out[num_decodes + self._num_prefill_tokens :] = 0.0
        return out

    def _attend_decodes(self, query: torch.Tensor, kv: LayerKv, out: torch.Tensor, shape: AttentionShape) -> None:
        """``query`` and ``out`` (D, heads, head_dim), one token of each of the first D requests."""
        sizes = self._decode_sizes(
            len(query),
            shape.num_kv_heads,
            shape.head_dim,
            query.dtype.itemsize,
            num_multiprocessors(query.device),
            is_quantised=kv.scales is not None,
        )
        if self._arrivals is None:
            self._arrivals = torch.zeros(self._max_arrivals, dtype=torch.int32, device=query.device)
        self._decode(
            query, kv, *self._decode_tables, out,
            scale=shape.scale, sizes=sizes, arrivals=self._arrivals, window=shape.sliding_window, softcap=shape.softcap,
            sinks=shape.sinks,
        )  # fmt: skip


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of ``device``, over which work is split."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    from tp_engine.kernels.attention.paged_prefill_triton import LARGE_SHARED_MEMORY

    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LARGE_SHARED_MEMORY))


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
    if needs.device_type == "cuda" and (largest := max(needs.head_dims)) > MAX_HEAD_DIM:
        return f"head_dim is {largest}; it takes at most {MAX_HEAD_DIM}: use attention_backend=torch"
    return why_no_triton(needs)


def why_no_triton(needs: AttentionNeeds) -> str | None:
    """Why no Triton kernel of attention can be used, with the remedy; None if one can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if not has_triton():
        return "the triton package is not installed; `pip install triton`, or use attention_backend=torch"
    is_too_old = needs.capability is not None and needs.capability < MIN_FP8_CAPABILITY
    if needs.kv_cache_dtype == torch.float8_e4m3fn and is_too_old:
        return "kv_cache_dtype is fp8, which GPUs before compute capability 8.9 do not have; set kv_cache_dtype=int8"
    return needs.why_too_old(MIN_CAPABILITY)
