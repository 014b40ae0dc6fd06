"""Latent attention's small operations by ``latents.c``; each calls its twin for inputs that C does not take."""

import ctypes

import torch

from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.kernels.attention import latents as twins
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule

MAX_ROPE_DIM, MAX_NOPE_DIM, MAX_VALUE_DIM = 256, 512, 512


def prepare_latents(
    library: ctypes.CDLL,
    query: torch.Tensor,
    rows: torch.Tensor,
    rule: NormRule,
    rotation: Rotation | None,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``latents.prepare_latents`` in C; both are overwritten, nothing is stored."""
    rank = len(rule.weight)
    turning: tuple[torch.Tensor | None, ...] = None, None, None
    rope_dim = rows.shape[1] - rank
    is_plain = not (rule.offset or rule.is_centred) and rule.weight.dtype == rows.dtype == query.dtype
    is_taken = is_plain and query.dtype in DTYPE_CODES and rope_dim <= MAX_ROPE_DIM
    if rotation is not None:
        turning = rotation.positions, rotation.table, rotation.query_scale
        is_taken = is_taken and rotation.table.dtype == query.dtype
        assert rotation.table.is_contiguous() and rotation.positions.dtype == torch.int64
        scale = rotation.query_scale
        assert scale is None or (scale.dtype == torch.float32 and scale.is_contiguous())
    if not (is_taken and _has_dense_tokens(query)):
        return twins.prepare_latents(query, rows, rule, rotation, is_interleaved, kv, slot_mapping)
    num_tokens, num_heads, query_dim = query.shape
    assert rows.stride(1) == 1
    library.prepare_latents(
        query, query.stride(0), rows, rows.stride(0), *turning, rule.weight, rule.eps, is_interleaved, num_tokens,
        num_heads, query_dim - rope_dim, rope_dim, rank, query.dtype,
    )  # fmt: skip
    return query, rows.unsqueeze(1)


def absorb_w_uk(library: ctypes.CDLL, query: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """Compute ``latents.absorb_w_uk`` in C."""
    if not (_is_taken(query, up, nope_dim) and _has_dense_tokens(query)):
        return twins.absorb_w_uk(query, up, nope_dim)
    (num_tokens, num_heads, query_dim), rank = query.shape, up.shape[2]
    rope_dim = query_dim - nope_dim
    out = torch.empty((num_tokens, num_heads, rank + rope_dim), dtype=query.dtype, device="cpu")
    sizes = num_tokens, num_heads, nope_dim, rope_dim, up.shape[1] - nope_dim, rank
    library.absorb_w_uk(query, query.stride(0), up, out, *sizes, query.dtype)
    return out


def project_w_uv(library: ctypes.CDLL, attended: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """Compute ``latents.project_w_uv`` in C."""
    if not (_is_taken(attended, up, nope_dim) and attended.is_contiguous()):
        return twins.project_w_uv(attended, up, nope_dim)
    (num_tokens, num_heads, rank), value_dim = attended.shape, up.shape[1] - nope_dim
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=attended.dtype, device="cpu")
    library.project_w_uv(attended, up, out, num_tokens, num_heads, nope_dim, value_dim, rank, attended.dtype)
    return out


def _is_taken(states: torch.Tensor, up: torch.Tensor, nope_dim: int) -> bool:
    """Whether C takes these types and sizes."""
    is_small = nope_dim <= MAX_NOPE_DIM and up.shape[1] - nope_dim <= MAX_VALUE_DIM
    return is_small and states.dtype in DTYPE_CODES and states.dtype == up.dtype and up.is_contiguous()


def _has_dense_tokens(states: torch.Tensor) -> bool:
    """Whether the heads of each token of ``states`` (N, heads, dim) lie together."""
    return states.stride(2) == 1 and states.stride(1) == states.shape[2]
