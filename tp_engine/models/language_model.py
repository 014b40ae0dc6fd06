"""What every language model on one rank is to those that run it: native layers, or a class's own modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import nn

from tp_engine.layers.attention import Attention
from tp_engine.layers.context import Layer
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.lora import LoRALayerSlots
from tp_engine.layers.recurrent import KeepsState
from tp_engine.layers.score_head import ScoreHead
from tp_engine.models.layer_embeddings import LayerEmbeddings
from tp_engine.models.mtp_head import MtpHead
from tp_engine.models.vision_tower import VisionTower


class LanguageModel(nn.Module, ABC):
    """Token ids in, hidden states out, then this rank's slice of the logits.

    Weights are allocated but not set: load them, then call ``finish_loading``, then bind the KV cache.
    """

    embed_tokens: VocabParallelEmbedding
    lm_head: ParallelLMHead
    score_head: ScoreHead | None
    layer_embeddings: LayerEmbeddings | None
    vision: VisionTower | None
    mtp: MtpHead | None
    hidden_size: int
    dtype: torch.dtype

    @property
    @abstractmethod
    def attention_of(self) -> dict[int, Attention]:
        """That of each layer that attends."""

    @property
    @abstractmethod
    def is_recordable(self) -> bool:
        """Whether recordings of steps can hold all that the model runs; known after ``finish_loading``."""

    @property
    def why_not_capture(self) -> str | None:
        """What keeps CUDA graphs from holding a step, if anything in the model does."""
        return None

    @abstractmethod
    def shortened(self) -> AbstractContextManager[None]:
        """Within this context only what differs runs: the rest needs no further memory."""

    @property
    def attention_layers(self) -> list[Attention]:
        """One per layer with K/V of its own, in order."""
        return [module for module in self.modules() if isinstance(module, Attention) and module.has_own_kv]

    @property
    def state_layers(self) -> list[KeepsState]:
        """One per layer with a recurrent state, in order."""
        return [module for module in self.modules() if isinstance(module, KeepsState)]

    @property
    def adapted_layers(self) -> list[LoRALayerSlots]:
        """One per linear layer that adapters may change, in order, then two per layer of experts."""
        linears = [adapters for layer in self._linears if (adapters := layer.adapters) is not None]
        return [*linears, *(stack for layer in self._experts if layer.adapters for stack in layer.adapters.stacks)]

    def take_adapters(self, other: LanguageModel) -> None:
        """Use the slots of another model of the same spec instead of this one's."""
        for own, theirs in zip(self._linears, other._linears, strict=True):
            own.adapters = theirs.adapters
        for own_experts, other_experts in zip(self._experts, other._experts, strict=True):
            own_experts.adapters = other_experts.adapters

    @property
    def _linears(self) -> list[LocalLinear]:
        return [module for module in self.modules() if isinstance(module, LocalLinear)]

    @property
    def expert_token_counts(self) -> list[torch.Tensor]:
        """For each layer with experts (experts,) int64: the tokens that went to each expert since the start."""
        return [experts.token_counts for experts in self._experts]

    @property
    def _experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def finish_loading(self) -> None:
        """Prepare the layers for running, once, after all weights have their values."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.finish_loading()

    def compute_local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` (n, hidden) -> (n, width), this rank's slice of the logits.  No collective."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``hidden`` (n, hidden) -> (n, vocab_size) on rank 0, None elsewhere.  A collective: all ranks call it."""
        return self.lm_head.gather(self.lm_head(hidden))
