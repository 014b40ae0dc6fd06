"""The layers' small operations in C: each as its PyTorch twin, which also takes what the C code does not.

Numbers that C takes as ``float`` are made floats here, because a tape keeps an argument by its Python type.
"""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels import activation, embedding, head_width, logits, norm, rope
from tp_engine.kernels.layer_kv import LayerKv
from tp_engine.kernels.native.layout import DTYPE_CODES
from tp_engine.kernels.norm import NormRule
from tp_engine.kernels.rope import HeadNorm, Heads, Rotation
from tp_engine.model_config.activation import Activation

MAX_HEAD_DIM = 256


class NativeOps:
    """Operations of ``kernels.ops.OPS``, by the functions of ``library``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._embed = library.embed
        self._norm = library.norm_rows
        self._add = library.add_scaled
        self._gate = library.gate_rows
        self._prepare_heads = library.prepare_heads
        self._head_squares = library.head_squares
        self._norm_width = library.norm_width
        self._cap_logits = library.cap_logits

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0
    ) -> torch.Tensor:
        """See ``embedding.embed``."""
        is_dense = token_ids.is_contiguous() and weight.is_contiguous()
        if token_ids.dtype != torch.int32 or not is_dense or weight.dtype not in DTYPE_CODES:
            return embedding.embed(token_ids, weight, first_id, scale)
        num_ids, width = weight.shape
        out = torch.empty((len(token_ids), width), dtype=weight.dtype)
        self._embed(
            token_ids.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            len(token_ids),
            width * weight.itemsize,
            first_id or 0,
            num_ids,
            float(scale),
            DTYPE_CODES[weight.dtype],
        )
        return out

    def norm(self, x: torch.Tensor, rule: NormRule) -> torch.Tensor:
        """See ``norm.norm``."""
        if not (x.is_contiguous() and x.dtype is rule.weight.dtype and x.dtype in DTYPE_CODES):
            return norm.norm(x, rule)
        return self._normalise(x, None, rule, 1.0)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0) -> torch.Tensor:
        """See ``norm.add_norm``."""
        if not (_are_dense(x, residual) and x.dtype is rule.weight.dtype):
            return norm.add_norm(x, residual, rule, scale)
        return self._normalise(x, residual.data_ptr(), rule, scale)

    def _normalise(self, x: torch.Tensor, residual: int | None, rule: NormRule, scale: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._norm(
            x.data_ptr(),
            residual,
            rule.weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            float(rule.eps),
            float(rule.offset),
            float(scale),
            int(rule.is_centred),
            DTYPE_CODES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> None:
        """See ``norm.add``."""
        if not _are_dense(x, residual):
            norm.add(x, residual, scale)
            return
        threads = torch.get_num_threads()
        self._add(x.data_ptr(), residual.data_ptr(), x.numel(), float(scale), DTYPE_CODES[x.dtype], threads)

    def gate(self, gate_up: torch.Tensor, rule: Activation) -> torch.Tensor:
        """See ``activation.gate``."""
        dtype = DTYPE_CODES.get(gate_up.dtype)
        if dtype is None or not gate_up.is_contiguous():
            return activation.gate(gate_up, rule)
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._gate(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            rule.code,
            float(rule.alpha),
            float(rule.limit),
            dtype,
            torch.get_num_threads(),
        )
        return out

    def prepare_heads(
        self,
        heads: torch.Tensor,
        num_kv_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation | None,
        kv: LayerKv | None,
        slot_mapping: torch.Tensor,
    ) -> Heads:
        """See ``rope.prepare_heads``; queries and keys are overwritten, nothing is stored."""
        dtype = DTYPE_CODES.get(heads.dtype)
        if dtype is None or not heads.is_contiguous() or heads.shape[2] > MAX_HEAD_DIM:
            return rope.prepare_heads(heads, num_kv_heads, norm, rotation, kv, slot_mapping)
        num_tokens, num_all, head_dim = heads.shape
        num_heads = num_all - 2 * num_kv_heads
        assert norm is None or norm.weights.dtype == heads.dtype
        if norm is not None or rotation is not None:
            self._prepare_heads(
                heads.data_ptr(),
                num_all * head_dim,
                *_rotation_arguments(rotation, heads.dtype),
                *(None, 0.0, 0.0) if norm is None else (norm.weights.data_ptr(), float(norm.eps), float(norm.offset)),
                num_tokens,
                num_heads,
                num_kv_heads,
                head_dim,
                dtype,
                torch.get_num_threads(),
            )
        query, key, value = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        return query, key, value

    def head_squares(self, heads: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """See ``head_width.head_squares``."""
        dtype = DTYPE_CODES.get(heads.dtype)
        if dtype is None or not heads.is_contiguous():
            return head_width.head_squares(heads, num_heads, num_kv_heads)
        num_tokens, num_all, head_dim = heads.shape
        squares = torch.empty((num_tokens, 2))
        self._head_squares(
            heads.data_ptr(),
            num_all * head_dim,
            squares.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            torch.get_num_threads(),
        )
        return squares

    def norm_width(
        self,
        heads: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        squares: torch.Tensor,
        weights: torch.Tensor,
        widths: tuple[int, int],
        eps: float,
    ) -> None:
        """See ``head_width.norm_width``."""
        is_dense = heads.is_contiguous() and squares.is_contiguous() and weights.is_contiguous()
        if not is_dense or heads.dtype not in DTYPE_CODES or heads.dtype is not weights.dtype:
            head_width.norm_width(heads, num_heads, num_kv_heads, squares, weights, widths, eps)
            return
        assert squares.dtype == torch.float32
        num_tokens, num_all, head_dim = heads.shape
        self._norm_width(
            heads.data_ptr(),
            num_all * head_dim,
            squares.data_ptr(),
            weights.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            *widths,
            float(eps),
            DTYPE_CODES[heads.dtype],
            torch.get_num_threads(),
        )

    def cap_logits(self, scores: torch.Tensor, scale: float, cap: float | None) -> None:
        """See ``logits.cap_logits``."""
        dtype = DTYPE_CODES.get(scores.dtype)
        if dtype is None or scores.stride(1) != 1:
            logits.cap_logits(scores, scale, cap)
            return
        stride, threads = scores.stride(0), torch.get_num_threads()
        self._cap_logits(scores.data_ptr(), stride, *scores.shape, float(scale), float(cap or 0.0), dtype, threads)


def _are_dense(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether the kernels take both: contiguous, of one type that they know."""
    is_dense = x.is_contiguous() and residual.is_contiguous()
    return is_dense and x.dtype is residual.dtype and x.dtype in DTYPE_CODES


def _rotation_arguments(rotation: Rotation | None, dtype: torch.dtype) -> tuple[int | None, ...]:
    """Addresses of positions and table, the rotary dimension, the address of the queries' scales."""
    if rotation is None:
        return None, None, 0, None
    table, positions, scale = rotation.table, rotation.positions, rotation.query_scale
    assert table.dtype == dtype and table.is_contiguous() and positions.dtype == torch.int64
    assert scale is None or (scale.dtype == torch.float32 and scale.is_contiguous())
    return positions.data_ptr(), table.data_ptr(), rotation.rotary_dim, None if scale is None else scale.data_ptr()
