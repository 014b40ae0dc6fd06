"""A language model on one rank: token ids in, hidden states out, then this rank's slice of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn

from tp_engine.attention.base import AttentionBackend
from tp_engine.layers.attention import Attention
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.norm import QKNorm, RMSNorm
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.model_config import ModelConfig
from tp_engine.models.decoder import DecoderLayer, SelfAttention


class CausalLM(nn.Module):
    """Base of all architectures; ``self_attention`` is what a subclass declares.

    Weights are allocated but not set: load them, then call ``finish_loading``, then bind the KV cache.
    """

    self_attention: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(
        self, config: ModelConfig, *, backend: AttentionBackend, max_model_len: int, context: LayerContext
    ) -> None:
        super().__init__()
        sizes = (config.vocab_size, config.hidden_size)
        self.embed_tokens = VocabParallelEmbedding(*sizes, context=context)
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, max_model_len, dtype=context.dtype, device=context.device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, backend, context, self.self_attention) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(*sizes, context=context, tied=tied)

    @property
    def attention_layers(self) -> list[Attention]:
        """One per layer, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @property
    def is_recordable(self) -> bool:
        """Whether a tape can hold all operations and products of its layers, once ``finish_loading`` was called."""
        layers = (LocalLinear, RMSNorm, SelfAttention, VocabParallelEmbedding)
        return all(module.is_recordable for module in self.modules() if isinstance(module, layers))

    def finish_loading(self) -> None:
        """Prepare the layers for running, once, after all weights have their values."""
        for module in self.modules():
            if isinstance(module, (LocalLinear, QKNorm)):
                module.finish_loading()

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Within, only the first ``num_layers`` layers run: all need the same memory, one after the other."""
        layers = self.layers
        self.layers = layers[:num_layers]
        try:
            yield
        finally:
            self.layers = layers

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``input_ids`` and ``positions`` (N,) -> (N, hidden), normalised.  Call it inside of ``forward_context``.

        With ``wanted`` (n,) int64, tokens whose outputs somebody reads: (n, hidden), theirs.  The last layer does no
        more for the others than to store their keys and values, and attend.
        """
        rotation = self.rotary(positions)
        residual = self.embed_tokens(input_ids)
        x: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rotation, wanted if index == last else None)
        assert x is not None
        return self.norm.reduce_add_and_norm(x, residual)

    def compute_local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` (n, hidden) -> (n, width), this rank's slice of the logits.  No collective."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``hidden`` (n, hidden) -> (n, vocab_size) on rank 0, None elsewhere.  A collective: all ranks call it."""
        return self.lm_head.gather(self.lm_head(hidden))
