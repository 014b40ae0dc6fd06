"""The head of a classifier or a reward model: linear layers from a hidden state to the scores of its labels.

A head is small: each rank has all of it, in float32 as in vLLM, and the first rank, which returns the scores, runs it.
All ranks have the same input.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.classifier import HeadLinear
from tp_engine.weights.source import Span


class ScoreHead(nn.Module):
    """(n, hidden) -> (n, labels) float32, with a ReLU between successive ``linears``."""

    def __init__(self, linears: Sequence[HeadLinear], hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        own = replace(context.unadapted, dtype=torch.float32)
        sizes = (hidden_size, *(linear.out_size for linear in linears))
        self.linears = nn.ModuleList(
            _linear(linear, in_size, own) for linear, in_size in zip(linears, sizes[:-1], strict=True)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = hidden.float()
        for number, linear in enumerate(self.linears):
            scores = linear(scores.relu() if number else scores)
        return scores


def _linear(linear: HeadLinear, in_size: int, context: LayerContext) -> LocalLinear:
    own, rows = context.at(linear.name), Span(0, linear.out_size)
    part = Part(name=own.path, stored_rows=linear.out_size, rows=rows, room=linear.out_size)
    shape = LinearShape(stored_columns=in_size, columns=Span(0, in_size), parts=(part,))
    dense = Dense(is_invariant=context.tp_invariant, choices=context.choices)
    return LocalLinear(shape, bias=linear.has_bias, context=own, format=dense)
