"""The head of a classifier or a reward model: linear layers from a hidden state to the scores of its labels.

A head is small: each rank has all of it, in float32 as in vLLM, and the first rank, which returns the scores, runs it.
Its input is equal on all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import whole_linear
from tp_engine.layers.quantization.dense import Dense
from tp_engine.model_config.classifier import HeadLinear


class ScoreHead(nn.Module):
    """(n, hidden) -> (n, labels) float32, with a relu between two of the ``linears``."""

    def __init__(self, linears: Sequence[HeadLinear], hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        own, dense = replace(context, dtype=torch.float32), Dense(is_invariant=context.tp_invariant)
        sizes = (hidden_size, *(linear.out_size for linear in linears))
        self.linears = nn.ModuleList(
            whole_linear(linear.name, in_size, linear.out_size, own, bias=linear.has_bias, format=dense)
            for linear, in_size in zip(linears, sizes[:-1], strict=True)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = hidden.float()
        for number, linear in enumerate(self.linears):
            scores = linear(scores.relu() if number else scores)
        return scores
