"""The layers' small operations in C: each as its PyTorch twin, which also takes what the C code does not."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels import activation, embedding, norm, rope
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
        self._rms_norm = library.rms_norm
        self._silu_and_mul = library.silu_and_mul
        self._prepare_heads = library.prepare_heads

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0
    ) -> torch.Tensor:
        """See ``embedding.embed``."""
        if scale != 1.0 or token_ids.dtype != torch.int32 or not (token_ids.is_contiguous() and weight.is_contiguous()):
            return embedding.embed(token_ids, weight, first_id, scale)
        num_ids, width = weight.shape
        out = torch.empty((len(token_ids), width), dtype=weight.dtype)
        row_bytes = width * weight.itemsize
        self._embed(
            token_ids.data_ptr(), weight.data_ptr(), out.data_ptr(), len(token_ids), row_bytes, first_id or 0, num_ids
        )
        return out

    def norm(self, x: torch.Tensor, rule: NormRule) -> torch.Tensor:
        """See ``norm.norm``."""
        if rule.offset or rule.is_centred:
            return norm.norm(x, rule)
        if not (x.is_contiguous() and x.dtype is rule.weight.dtype and x.dtype in DTYPE_CODES):
            return norm.norm(x, rule)
        return self._normalise(x, None, rule)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0) -> torch.Tensor:
        """See ``norm.add_norm``."""
        if rule.offset or rule.is_centred or scale != 1.0:
            return norm.add_norm(x, residual, rule, scale)
        is_dense = x.is_contiguous() and residual.is_contiguous()
        if not (is_dense and x.dtype is residual.dtype is rule.weight.dtype and x.dtype in DTYPE_CODES):
            return norm.add_norm(x, residual, rule, scale)
        return self._normalise(x, residual.data_ptr(), rule)

    def _normalise(self, x: torch.Tensor, residual: int | None, rule: NormRule) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._rms_norm(
            x.data_ptr(),
            residual,
            rule.weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            rule.eps,
            DTYPE_CODES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def gate(self, gate_up: torch.Tensor, rule: Activation) -> torch.Tensor:
        """See ``activation.gate``."""
        dtype = DTYPE_CODES.get(gate_up.dtype)
        if dtype is None or not gate_up.is_contiguous() or rule.kind != "silu":
            return activation.gate(gate_up, rule)
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, dtype, torch.get_num_threads())
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
        is_known = rotation is not None and rotation.rotary_dim == heads.shape[2] and rotation.query_scale is None
        is_known = is_known and (norm is None or norm.offset == 0.0)
        if dtype is None or not heads.is_contiguous() or heads.shape[2] > MAX_HEAD_DIM or not is_known:
            return rope.prepare_heads(heads, num_kv_heads, norm, rotation, kv, slot_mapping)
        assert rotation is not None
        table, positions = rotation.table, rotation.positions
        assert table.dtype == heads.dtype and positions.dtype == torch.int64
        num_tokens, num_all, head_dim = heads.shape
        num_rotated = num_all - num_kv_heads
        assert norm is None or norm.weights.dtype == heads.dtype
        self._prepare_heads(
            heads.data_ptr(),
            num_all * head_dim,
            positions.data_ptr(),
            table.data_ptr(),
            None if norm is None else norm.weights.data_ptr(),
            0.0 if norm is None else norm.eps,
            num_tokens,
            num_rotated,
            head_dim,
            dtype,
            torch.get_num_threads(),
        )
        query, key, value = heads.split_with_sizes((num_rotated - num_kv_heads, num_kv_heads, num_kv_heads), 1)
        return query, key, value
