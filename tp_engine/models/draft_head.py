"""What a step runs of a draft head, whether it was trained for a model or is a part of the model's checkpoint."""

from typing import TypedDict

import torch
from torch import nn

from tp_engine.layers.attention import Attention
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding


class _Kept(TypedDict):
    dtype: torch.dtype
    device: torch.device


class DraftHead(nn.Module):
    """A small decoder that drafts a model's next tokens from ``state_size`` elements of the model's states and from the
    tokens behind them.

    The K/V of position p are made of the states at p and of token p + 1.  Draft tokens come from ``lm_head``.
    """

    lm_head: ParallelLMHead

    def __init__(self, state_size: int, context: LayerContext) -> None:
        super().__init__()
        self._state_size = state_size
        self._kept_as: _Kept = {"dtype": context.dtype, "device": context.device}

    def embed_as(self, embedding: VocabParallelEmbedding) -> None:
        """Use the ``embedding`` of the model that runs from now on, unless the head has its own."""

    def finish_loading(self) -> None:
        """Prepare what is no part of the model, once, after all weights have their values; raises ``WeightError``."""

    @property
    def own_attention(self) -> list[Attention]:
        """Its layers with K/V that are not among the model's."""
        return []

    def new_states(self, num_tokens: int) -> torch.Tensor:
        """Room for the model's states of ``num_tokens``, (num_tokens, state_size)."""
        return torch.empty((num_tokens, self._state_size), **self._kept_as)

    @property
    def state_bytes(self) -> int:
        """Bytes of the model's states of one token."""
        return self._state_size * self._kept_as["dtype"].itemsize

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the model's ``states`` (N, state_size) -> (N, hidden), in the place of the head's own output."""
        return states

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` (N, hidden) of ``positions`` (N,), which may change, and the tokens behind, ``input_ids`` (N,).

        Returns of the tokens ``wanted`` (n,) int64, or of all, what ``lm_head`` reads and what the next draft token
        takes as ``hidden``, both (n, hidden).  Call it inside of ``forward_context``.
        """
        raise NotImplementedError  # each kind of head has its own

    def tokens_of(self, drafts: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens (n,) of the same type for ids ``drafts`` (n,) of the drafts' vocabulary."""
        return drafts
