"""A residual of several streams, against the modules of transformers; operations: spread_streams, read_mixture,
write_streams, norm_streams, gate_low, read_gated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from tests.simulated_ranks import run_ranks
from tp_engine.apps.advice.sizes import activation_bytes
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.errors import ConfigError
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.quantization import choose_formats
from tp_engine.layers.streams import StreamJoin, StreamReader, make_reader
from tp_engine.model_config import read_model
from tp_engine.model_config.draft_head import read_draft_head
from tp_engine.model_config.streams import GatedStreamSpec, HyperConnectionSpec

COUNT, HIDDEN, TOKENS = 4, 24, 5
MIXED = HyperConnectionSpec(
    count=COUNT, attention="attn_hc", mlp="ffn_hc", end="hc_head", eps=1e-6, floor=1e-6, num_steps=20
)
GATED = GatedStreamSpec(count=COUNT, attention="a", mlp="m", end="mixer", eps=1e-6, rank=8)


def context(communicator: Communicator | None = None) -> LayerContext:
    return LayerContext(
        communicator=communicator or SingleRank(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        format_of=choose_formats(None),
    )


def randomised(module: nn.Module) -> Any:
    for value in module.parameters():
        nn.init.normal_(value, std=0.3)
    return module.requires_grad_(False)


def load(reader: StreamReader, **values: torch.Tensor) -> StreamReader:
    """Set the named weights, then finish each layer."""
    for name, value in values.items():
        reader.get_parameter(name).data.copy_(value)
    for layer in reader.modules():
        if isinstance(layer, Layer):
            layer.finish_loading()
    return reader


def mixed_pair() -> tuple[Any, StreamReader]:
    """A module of transformers, and the reader with its weights."""
    sizes = SimpleNamespace(hc_mult=COUNT, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=HIDDEN)
    theirs = randomised(DeepseekV4HyperConnection(sizes))
    own = make_reader(MIXED, MIXED.attention, HIDDEN, context=context())
    return theirs, load(own, fn=theirs.fn, base=theirs.base, scale=theirs.scale)


def test_hyper_connections_equal_transformers() -> None:
    """Oracle: DeepseekV4HyperConnection, then the sum in its decoder layer, for the outputs of two ranks."""
    torch.manual_seed(0)
    theirs, own = mixed_pair()
    streams, output = torch.randn(TOKENS, COUNT, HIDDEN), torch.randn(2, TOKENS, HIDDEN)
    post, comb, collapsed = theirs(streams[None])
    written = post.unsqueeze(-1) * output.sum(0)[None, :, None] + comb.transpose(-1, -2) @ streams[None]

    def run(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        join = StreamJoin(MIXED, own, None, None, context=context(communicator))
        rows = join.begin(torch.zeros(TOKENS, HIDDEN))
        rows[:, : COUNT * HIDDEN] = streams.flatten(1)
        mixture = join(None, rows)
        join(output[communicator.info.rank].clone(), rows)
        return mixture, rows[:, : COUNT * HIDDEN].unflatten(1, (COUNT, HIDDEN))

    for mixture, found in run_ranks(2, run):
        torch.testing.assert_close(mixture, collapsed[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(found, written[0], atol=1e-5, rtol=0)


def test_sinkhorn_makes_a_doubly_stochastic_matrix() -> None:
    """Oracle: rows and columns have a sum of 1, so what all streams have in common stays as it is."""
    torch.manual_seed(1)
    _, own = mixed_pair()
    join = StreamJoin(MIXED, own, None, None, context=context())
    embedded = torch.randn(TOKENS, HIDDEN)
    rows = join.begin(embedded)
    join(None, rows)
    join(torch.zeros(TOKENS, HIDDEN), rows)
    torch.testing.assert_close(rows[:, :HIDDEN], embedded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["hc_head", None])
def test_the_end_equals_transformers(name: str | None) -> None:
    """Oracle: DeepseekV4HyperHead; without a module the mean (GLM-5.3-Flash)."""
    torch.manual_seed(2)
    sizes = SimpleNamespace(hc_mult=COUNT, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=HIDDEN)
    theirs, streams = randomised(DeepseekV4HyperHead(sizes)), torch.randn(TOKENS, COUNT, HIDDEN)
    own = make_reader(replace(MIXED, end=name), name, HIDDEN, context=context())
    weights = {} if name is None else {"fn": theirs.hc_fn, "base": theirs.hc_base, "scale": theirs.hc_scale}
    rows = torch.nn.functional.pad(streams.flatten(1), (0, MIXED.row_size(HIDDEN) - COUNT * HIDDEN))
    expected = streams.mean(1) if name is None else theirs(streams[None])[0]
    torch.testing.assert_close(load(own, **weights)(rows), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_end", [False, True])
def test_gated_streams_equal_transformers(is_end: bool) -> None:
    """Oracle: Qwen4ExpTextGatedResidual, then the sum in its decoder layer."""
    torch.manual_seed(3)
    sizes = SimpleNamespace(hc_count=COUNT, hidden_size=HIDDEN, rms_norm_eps=1e-6, hc_lowrank=8)
    theirs = randomised(Qwen4ExpTextGatedResidual(sizes, use_combine=not is_end))
    own = make_reader(GATED, GATED.end if is_end else GATED.mlp, HIDDEN, context=context())
    weights = {
        "weight": theirs.hc_norm.weight,
        "down.weight": theirs.input_mix_weight_down.weight,
        "up.weight": theirs.input_mix_weight_up.weight,
    }
    if not is_end:
        weights["inject.weight"] = theirs.block_inject_weight.weight
    streams, output = torch.randn(TOKENS, COUNT * HIDDEN), torch.randn(TOKENS, HIDDEN)
    join = StreamJoin(GATED, load(own, **weights), None, None, context=context())
    rows = join.begin(torch.zeros(TOKENS, HIDDEN))
    rows[:, : COUNT * HIDDEN] = streams
    found, expected = join(None, rows), theirs(streams)
    torch.testing.assert_close(found, expected if is_end else expected[0], atol=1e-5, rtol=0)
    if not is_end:
        join(output.clone(), rows)
        written = streams + (output.unsqueeze(-2) * expected[2].unsqueeze(-1)).flatten(-2)
        torch.testing.assert_close(rows[:, : COUNT * HIDDEN], written, atol=1e-5, rtol=0)


def test_recommend_counts_the_streams_and_draft_heads_are_refused() -> None:
    """Oracle: by hand; a step has its rows once in the model's type, and twice in float32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
    }
    plain = read_model(config)
    several = replace(plain, layers=tuple(replace(layer, streams=MIXED) for layer in plain.layers))
    more, less = (
        activation_bytes(one, 1, dtype="bfloat16", num_tokens=10, num_sequences=1) for one in (several, plain)
    )
    assert more - less == 10 * COUNT * 64 * (2 + 2 * 4)
    with pytest.raises(ConfigError, match="reads a residual of one stream, and LlamaForCausalLM has 4"):
        read_draft_head({"architectures": ["LlamaForCausalLMEagle3"]}, set(), several)
