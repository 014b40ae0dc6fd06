"""What a step runs of a draft head, whether it was trained for a model or is a part of the model's checkpoint."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn

from tp_engine.layers.attention import Attention
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.weights.source import Span


class _Kept(TypedDict):
    dtype: torch.dtype
    device: torch.device


class DraftHead(nn.Module):
    """A small decoder that drafts a model's next tokens from ``state_size`` elements of the model's states and from the
    tokens after them.

    The K/V of position p are made of the states at p and of token p + 1.  Draft tokens come from ``lm_head``.
    ``state_size``, ``out_size`` and ``fed_size``: elements of the model's states of a token, and of both results.
    """

    lm_head: ParallelLMHead
    keeps_kv = True
    """Whether its layers keep keys and values; otherwise they read the model's."""
    groups: tuple[int, ...] = ()
    """The KV groups of the layers that it reads, if it keeps none."""
    has_map = False
    """Whether ids of drafts are others than the model's (``tokens_of``)."""

    def __init__(self, state_size: int, out_size: int, fed_size: int, context: LayerContext) -> None:
        super().__init__()
        self._state_size, self.out_size, self.fed_size = state_size, out_size, fed_size
        self._copy_rows = context.op("copy_rows")
        self._kept_as: _Kept = {"dtype": context.dtype, "device": context.device}

    def serve(self, embedding: VocabParallelEmbedding, attention: Mapping[int, Attention]) -> None:
        """Draft for another model from now on: use its ``embedding``, unless the head has its own, and the keys and
        values of its layers' ``attention``, if the head reads them."""

    def finish_loading(self) -> None:
        """Prepare what is not part of the model, once, after all weights have their values; raises ``WeightError``."""

    @property
    def own_attention(self) -> list[Attention]:
        """Its layers with K/V that are not among the model's."""
        return []

    def new_states(self, num_tokens: int) -> torch.Tensor:
        """Room for the model's states of ``num_tokens``, (num_tokens, state_size)."""
        return torch.zeros((num_tokens, self._state_size), **self._kept_as)

    def new_outputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for both results of ``forward`` of ``num_tokens``."""
        return (
            torch.zeros((num_tokens, self.out_size), **self._kept_as),
            torch.zeros((num_tokens, self.fed_size), **self._kept_as),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of the model's states of one token, and of both results."""
        return (self._state_size + self.out_size + self.fed_size) * self._kept_as["dtype"].itemsize

    def columns_of(self, parts: Sequence[torch.Tensor], columns: Span) -> torch.Tensor:
        """Return ``columns`` of ``parts`` (N, any width) side by side, contiguous; recordings can hold it."""
        if len(parts) == 1 and columns == (0, parts[0].shape[1]):
            return parts[0]
        room, start = parts[0].new_empty((len(parts[0]), columns.size)), -columns.start
        for part in parts:
            first, end = max(start, 0), min(start + part.shape[1], columns.size)
            if first < end:
                self._copy_rows(part[:, first - start : end - start], room[:, first:end])
            start += part.shape[1]
        return room

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the model's ``states`` (N, state_size) -> (N, hidden), in the place of the head's own output."""
        return states

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` (N, hidden) of ``positions`` (N,), which may change, and the tokens after, ``input_ids`` (N,).

        Returns of the tokens ``wanted`` (n,) int64, or of all, what ``lm_head`` reads and what the next draft token
        takes as ``hidden``, both (n, hidden).  Call it inside of ``forward_context``.
        """
        raise NotImplementedError  # each kind of head has its own

    def store(self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Store the keys and values that ``forward`` would, where it ``keeps_kv``; no product after them is made."""
        raise NotImplementedError  # heads without keys and values of their own are never asked

    def tokens_of(self, drafts: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens (n,) of the same type for ids ``drafts`` (n,) of the drafts' vocabulary."""
        return drafts
