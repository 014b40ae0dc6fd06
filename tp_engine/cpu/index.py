"""The choice of keys by ``index.c``; each calls its twin for inputs that C does not take."""

import ctypes

import torch

from tp_engine.cpu.latents import MAX_ROPE_DIM
from tp_engine.cpu.layout import CACHE_CODES, DTYPE_CODES
from tp_engine.cpu.tape import address_of
from tp_engine.kernels.attention import index_keys as twins
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.index_keys import ChosenKeys, KeyNorm
from tp_engine.kernels.kv_cache.layer_kv import SCALE_DTYPE, LayerKv

MAX_INDEX_DIM, MAX_INDEX_ITEMS = 256, 1 << 14


def prepare_index(
    library: ctypes.CDLL,
    queries: torch.Tensor,
    keys: torch.Tensor,
    norm: KeyNorm,
    rotation: Rotation,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``index_keys.prepare_index`` in C; both are overwritten, and keys stored."""
    table, (num_tokens, num_heads, dim) = rotation.table, queries.shape
    tensors = queries, keys, norm.weight, norm.bias, table
    is_plain = all(one.dtype == queries.dtype and one.is_contiguous() for one in tensors)
    dtype = DTYPE_CODES.get(queries.dtype)
    cache_dtype = dtype if kv is None else CACHE_CODES.get(kv.cache.dtype)
    if (
        dtype is None
        or cache_dtype is None
        or not is_plain
        or dim > MAX_INDEX_DIM
        or rotation.rotary_dim > MAX_ROPE_DIM
    ):
        return twins.prepare_index(queries, keys, norm, rotation, is_interleaved, kv, slot_mapping)
    assert rotation.positions.dtype == slot_mapping.dtype == torch.int64
    cache = (None, None, 0, 0, 1) if kv is None else _place(kv)
    library.prepare_index(
        queries, keys, rotation.positions, table, norm.weight, norm.bias, norm.eps, is_interleaved, num_tokens,
        num_heads, dim, rotation.rotary_dim, *cache, cache_dtype, slot_mapping, dtype,
    )  # fmt: skip
    return queries, keys if kv is None else None


def choose_keys(
    library: ctypes.CDLL,
    queries: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
) -> ChosenKeys:
    """Compute ``index_keys.choose_keys`` in C.  Positions after a row's count are not written."""
    (num_rows, num_heads, dim), dtype = queries.shape, DTYPE_CODES.get(queries.dtype)
    cache_dtype = CACHE_CODES.get(kv.cache.dtype)
    is_dense = queries.is_contiguous() and weights.is_contiguous() and block_table.stride(1) == 1
    is_small = dim <= MAX_INDEX_DIM and num_heads * dim <= MAX_INDEX_ITEMS
    if dtype is None or cache_dtype is None or not (is_dense and is_small):
        return twins.choose_keys(queries, weights, scale, kv, block_table, seq_lens, top_k)
    assert weights.dtype == torch.float32 and block_table.dtype == seq_lens.dtype == torch.int32
    chosen = ChosenKeys(
        torch.empty((num_rows, top_k), dtype=torch.int32, device="cpu"),
        torch.empty(num_rows, dtype=torch.int32, device="cpu"),
    )
    failed = library.choose_keys(
        queries, weights, scale, *_place(kv), block_table, block_table.stride(0), seq_lens, *chosen, num_rows,
        num_heads, dim, top_k, cache_dtype, dtype,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"there is no memory for the scores of {int(seq_lens.max())} index keys")
    return chosen


def _place(kv: LayerKv) -> tuple[int, int | None, int, int, int]:
    """Where the rows and their scales lie: addresses, bytes from one block to the next of each, tokens of a block."""
    scales = None if kv.scales is None else address_of(kv.scales, SCALE_DTYPE)
    bytes_apart = kv.block_stride * kv.cache.itemsize, kv.scale_stride * SCALE_DTYPE.itemsize
    return address_of(kv.cache), scales, *bytes_apart, kv.cache.shape[2]
