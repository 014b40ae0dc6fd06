"""The decoder that the supported architectures share: pre-norm attention and SwiGLU blocks with rotary positions.

An architecture is a ``CausalLM`` that says which attention block it is made of; sizes, biases and windows come from the
configuration.  Nothing here knows of ranks: the layers do.
"""

from __future__ import annotations

import torch
from torch import nn

from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.kernels.ops import is_recordable, op
from tp_engine.kernels.rope import Rotation
from tp_engine.layers.attention import Attention
from tp_engine.layers.context import LayerContext
from tp_engine.layers.forward_context import current_metadata
from tp_engine.layers.linear import GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tp_engine.layers.norm import QKNorm, RMSNorm
from tp_engine.model_config import ModelConfig


class SelfAttention(nn.Module):
    """Projections, rotation, attention, this rank's part of the projection back; ``index`` is the layer's.

    ``is_recordable``: whether a tape can hold what is done to the heads.
    """

    def __init__(self, config: ModelConfig, index: int, backend: AttentionBackend, context: LayerContext) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            context=context,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.out_bias, context=context
        )
        shape = AttentionShape(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[index],
        )
        self.attention = Attention(shape, backend)
        self.qk_norm: QKNorm | None = None
        self._num_all = shape.num_heads + 2 * shape.num_kv_heads
        self._prepare_heads = op("prepare_heads", context.device.type)
        self.is_recordable = is_recordable("prepare_heads", context.device.type)

    def forward(self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None) -> torch.Tensor:
        attention = self.attention
        shape = attention.shape
        heads = self.qkv_proj(x).view(len(x), self._num_all, shape.head_dim)
        attended = attention(
            *self._prepare_heads(
                heads,
                shape.num_kv_heads,
                None if self.qk_norm is None else self.qk_norm.head_norm,
                rotation,
                attention.kv,
                current_metadata().slot_mapping,
            )
        )
        return self.o_proj.part(_only(wanted, attended.reshape(len(x), -1)))


class QKNormSelfAttention(SelfAttention):
    """Self-attention that normalises every query and key head before the rotation."""

    def __init__(self, config: ModelConfig, index: int, backend: AttentionBackend, context: LayerContext) -> None:
        super().__init__(config, index, backend, context)
        shape = self.attention.shape
        self.qk_norm = QKNorm(shape.num_heads, shape.num_kv_heads, shape.head_dim, config.rms_norm_eps, context=context)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, this rank's part of it."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = GatedColumnParallelLinear(config.hidden_size, inner, bias=config.mlp_bias, context=context)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, bias=config.mlp_bias, context=context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.part(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    """One layer.  The residual stream is carried along and added to in place."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        backend: AttentionBackend,
        context: LayerContext,
        self_attention: type[SelfAttention],
    ) -> None:
        super().__init__()
        self.self_attn = self_attention(config, index, backend, context)
        self.mlp = GatedMLP(config, context)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` is this rank's part of the last block's output, not yet added to ``residual``; None before the first.

        So is what it returns, with the residual: the ranks' parts are added up with it by the next norm.  Both are of
        the tokens ``wanted`` (n,) int64 alone, if given: of the others only keys and values are needed.
        """
        norm = self.input_layernorm
        normalised = norm(residual) if x is None else norm.reduce_add_and_norm(x, residual)
        attended = self.self_attn(normalised, rotation, wanted)
        residual = _only(wanted, residual)
        return self.mlp(self.post_attention_layernorm.reduce_add_and_norm(attended, residual)), residual


def _only(wanted: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    return tokens if wanted is None else tokens.index_select(0, wanted)
