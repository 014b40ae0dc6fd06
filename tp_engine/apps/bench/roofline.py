"""The least time that a machine needs for a workload: bytes over its bandwidth, or operations over its matmul rate.

A decode step reads all weights once, and the K and V of every running request; it reads and writes the recurrent state
of each.  Matrix products limit prompts::

    decode step   max( (weights + context tokens * kv bytes + 2 * rows * state bytes) / bandwidth,
                       2 * parameters * rows / matmul rate )
    prompts       (2 * parameters * tokens  +  attention) / matmul rate
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tp_engine.apps.bench.workloads import BenchWorkload
from tp_engine.model_config import read_model
from tp_engine.model_config.kv_layout import STATE_BYTES
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.models.weight_sizes import local_parameters


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """``num_parameters`` take part in one token's products; of the experts, only those of the token count.

    ``kv_values`` is the number of K and V values of one token in all layers.  ``experts`` has, for each layer with
    experts: the parameters of one expert, the number of experts, and the number of experts per token.  ``state_bytes``
    are those of one request's recurrent states.
    """

    num_parameters: int
    itemsize: int
    kv_values: int
    num_layers: int
    attention_width: int
    experts: tuple[tuple[int, int, int], ...] = ()
    state_bytes: int = 0

    def weight_bytes(self, num_rows: int = 1) -> float:
        """Bytes of weights that a decode step of ``num_rows`` must read.  An untied input embedding does not count.
        The number of experts read is the expected one for ``num_rows`` rows that choose independently and evenly."""
        further = sum(
            parameters * (total * (1 - (1 - top_k / total) ** num_rows) - top_k)
            for parameters, total, top_k in self.experts
        )
        return (self.num_parameters + further) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The rates of all devices together, measured in the same run: bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float = math.inf


def model_cost(config: Mapping[str, Any], dtype: str) -> ModelCost:
    """The cost of the model that a config.json describes, with weights and KV cache in ``dtype``."""
    model = read_model(config)
    num_parameters = local_parameters(model, 1, active_only=True)
    if not model.tie_word_embeddings:
        num_parameters -= model.vocab_size * model.hidden_size
    attentions = model.attentions
    kinds = [attention.kv_kind for attention in attentions]
    return ModelCost(
        num_parameters=num_parameters,
        itemsize=4 if dtype == "float32" else 2,
        kv_values=sum(kind.num_parts * kind.num_kv_heads * kind.head_dim for kind in kinds),
        num_layers=model.num_layers,
        attention_width=max(attention.num_heads * attention.head_dim for attention in attentions),
        experts=tuple(
            (3 * model.hidden_size * layer.experts.inner_size, layer.experts.num_experts, layer.experts.rule.top_k)
            for layer in model.layers
            if layer.experts is not None
        ),
        state_bytes=sum(
            STATE_BYTES * layer.attention.kv_kind.num_elements
            for layer in model.layers
            if isinstance(layer.attention, RecurrentSpec)
        ),
    )


def decode_step_s(cost: ModelCost, ceilings: Ceilings, *, num_rows: int, num_context_tokens: int) -> float:
    """Seconds of one decode step of ``num_rows`` requests with ``num_context_tokens`` in the cache together."""
    num_bytes = cost.weight_bytes(num_rows) + num_context_tokens * cost.kv_values * cost.itemsize
    num_bytes += 2 * num_rows * cost.state_bytes
    return max(num_bytes / ceilings.bytes_per_s, 2 * cost.num_parameters * num_rows / ceilings.flops_per_s)


def prompts_s(cost: ModelCost, ceilings: Ceilings, lengths: list[int], num_shared: int = 0) -> float:
    """Seconds for prompts of these lengths; their first ``num_shared`` tokens are equal and computed once.  Causal
    attention takes 2 * width operations per pair of tokens and layer for the scores, and as many for the values."""
    num_tokens = num_shared + sum(length - num_shared for length in lengths)
    pairs = _pairs(num_shared) + sum(_pairs(length) - _pairs(num_shared) for length in lengths)
    attention = 4 * cost.num_layers * cost.attention_width * pairs
    return (2 * cost.num_parameters * num_tokens + attention) / ceilings.flops_per_s


def _pairs(length: int) -> float:
    return length * (length + 1) / 2


def workload_s(cost: ModelCost, ceilings: Ceilings, workload: BenchWorkload) -> float:
    """Seconds of a whole workload: all requests start at once and decode together until each has its tokens."""
    prompts = np.array([len(prompt) for prompt in workload.prompts])
    wanted = np.array(workload.max_tokens)
    total_s = prompts_s(cost, ceilings, prompts.tolist(), workload.num_shared)
    for step in range(1, int(wanted.max())):
        running = wanted > step  # the first token comes from the prompt's step
        context = int((prompts[running] + step).sum())
        total_s += decode_step_s(cost, ceilings, num_rows=int(running.sum()), num_context_tokens=context)
    return total_s
