"""Layers one by one, against plain PyTorch or transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.simulated_ranks import run_ranks
from tests.unit.models.test_models import CPU, LLAMA3, prefill_metadata
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.tiles import attend_last
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.kernels import ops
from tp_engine.kernels.attention.heads import apply_rotary, norm_heads
from tp_engine.kernels.kv_cache.layer_kv import KeyValue
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization.row_codes import CodeRule, RowCodes, quantise_rows
from tp_engine.layers import residual
from tp_engine.layers.attention import current_metadata, forward_context
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.linear import RowParallelLinear
from tp_engine.layers.norm import Norm, QKNorm
from tp_engine.layers.quantization import choose_formats
from tp_engine.layers.quantization.quantised_products import WantedCodes
from tp_engine.layers.residual import Join
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.model_config.mlp import SILU
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, NormSpec, QkNormSpec
from tp_engine.weights.source import as_stored, sources_of

ALONE = LayerContext(communicator=SingleRank(), dtype=torch.float32, device=CPU, format_of=choose_formats(None))
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "linear": ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama3": ({"kind": "llama3", "factor": 8.0, "original_max_position": 64}, LLAMA3),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_rotary_equals_transformers(name: str, head_dim: int) -> None:
    """Oracle: transformers' Llama rotation, at scattered positions up to 8191."""
    numbers, parameters = ROPES[name]
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=8192, rope_parameters=dict(parameters))
    positions = torch.tensor([0, 1, 5, 63, 64, 1000, 8191])
    heads = torch.randn(len(positions), 3, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotary = RotaryEmbedding(RopeSpec(rotary_dim=head_dim, **numbers), 8192, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(apply_rotary(heads, *rotary(positions).cos_sin()), expected[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype: torch.dtype) -> None:
    """Oracle: the formula in float64; an error of at most one rounding of the result."""
    context = LayerContext(communicator=SingleRank(), dtype=dtype, device=CPU, format_of=choose_formats(None))
    norm = Norm(NormSpec(name="norm", eps=1e-5), 48, context=context)
    norm.weight.copy_(torch.randn(48))
    x, residual = torch.randn(7, 48, dtype=dtype), torch.randn(7, 48, dtype=dtype)
    total = x + residual

    def formula(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()

    close: dict[str, Any] = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(norm(x).double(), formula(x), **close)
    joined = Join(None, norm, 1.0, context=context)(x, residual)
    torch.testing.assert_close(joined.double(), formula(total), **close)
    assert torch.equal(residual, total)


def test_qk_norm_on_a_view() -> None:
    """Oracle: one RMSNorm for the query heads and one for the key heads."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    norm = QKNorm(QkNormSpec(eps=1e-6), attention, as_stored, context=ALONE)
    norm.q_weight.copy_(torch.randn(8))
    norm.k_weight.copy_(torch.randn(8))
    heads = torch.randn(5, 8, 8)[:, :6]
    expected = torch.cat(
        (F.rms_norm(heads[:, :4], (8,), norm.q_weight, 1e-6), F.rms_norm(heads[:, 4:], (8,), norm.k_weight, 1e-6)), 1
    )
    norm.finish_loading()
    assert norm.head_norm is not None
    torch.testing.assert_close(norm_heads(heads, norm.head_norm), expected)


def test_gate() -> None:
    """Oracle: the formula."""
    x = torch.randn(5, 14)
    torch.testing.assert_close(gate(x, SILU), F.silu(x[:, :7]) * x[:, 7:])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab_size", [17, 203])
def test_vocabulary_layers(vocab_size: int, world_size: int) -> None:
    """Oracle: the whole table; some ranks hold padding alone, and gathered logits have no column for it."""
    table, ids, hidden = torch.randn(vocab_size, 8), torch.randint(vocab_size, (40,)), torch.randn(5, 8)

    def body(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        context = LayerContext(
            communicator=communicator, dtype=torch.float32, device=CPU, format_of=choose_formats(None)
        )
        embedding = VocabParallelEmbedding(vocab_size, 8, context=context)
        assert embedding.weight is not None
        rows = embedding.weight.shape[0]
        padded = torch.cat((table, torch.zeros(rows * world_size - vocab_size, 8)))
        embedding.weight.copy_(padded[communicator.info.rank * rows :][:rows])
        head = ParallelLMHead(vocab_size, 8, context=context, tied=embedding)
        assert not list(head.parameters())
        head.finish_loading()
        local = head(hidden)
        assert local.shape == (5, head.slice.width)
        return embedding(ids), local[:, : head.slice.num_ids], head.gather(local)

    results = run_ranks(world_size, body)
    for embedded, _, _ in results:
        assert torch.equal(embedded, table[ids])
    logits = results[0][2]
    assert logits is not None and all(other is None for _, _, other in results[1:])
    torch.testing.assert_close(logits, hidden @ table.T)
    assert torch.equal(torch.cat([local for _, local, _ in results], dim=-1), logits)


def test_row_parallel_bias_is_added_once() -> None:
    """Oracle: the whole linear layer."""
    weight, bias, x = torch.randn(6, 12), torch.randn(6), torch.randn(4, 12)

    def body(communicator: Communicator) -> torch.Tensor:
        context = LayerContext(
            communicator=communicator, dtype=torch.float32, device=CPU, format_of=choose_formats(None)
        )
        layer = RowParallelLinear(12, 6, bias=True, context=context)
        part = slice(communicator.info.rank * 4, communicator.info.rank * 4 + 4)
        assert isinstance(layer.weight, torch.Tensor) and layer.bias is not None
        layer.weight.copy_(weight[:, part])
        layer.bias.copy_(bias)
        layer.finish_loading()
        out: torch.Tensor = layer(x[:, part])
        return out

    for result in run_ranks(3, body):
        torch.testing.assert_close(result, F.linear(x, weight, bias))


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (0.7, False), (None, True), (20.0, True)])
@pytest.mark.parametrize("longest", [9, 300])
def test_attention_of_prompts(window: int | None, softcap: float | None, has_sinks: bool, longest: int) -> None:
    """Oracle: softmax over explicit scores, token by token and head by head."""
    sinks = torch.tensor([-4.0, 0.0, 1.0, 5.0]) if has_sinks else None
    rule: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
    lengths, shape = (3, 1, longest), AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, **rule)
    query, key, value = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    parts = zip(*(one.split(lengths) for one in (query, key, value)), strict=True)
    found = torch.cat([attend_last(own, KeyValue(*states), shape) for own, *states in parts])
    start = 0
    for length in lengths:
        for token in range(length):
            first = start + max(0, token + 1 - (window or length))
            seen = slice(first, start + token + 1)
            for head in range(4):
                scores = (key[seen, head // 2] @ query[start + token, head]) * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                expected = scores.softmax(0)[: seen.stop - seen.start] @ value[seen, head // 2]
                torch.testing.assert_close(found[start + token, head], expected)
        start += length


def test_forward_context_ends_with_its_block() -> None:
    """Oracle: the innermost block's metadata, that of the requested group; none outside."""
    outer, inner, second = (prefill_metadata((length,)) for length in (1, 2, 3))
    with forward_context([outer]):
        with forward_context([inner, second]):
            assert current_metadata() is inner and current_metadata(1) is second
        assert current_metadata() is outer
    with pytest.raises(AssertionError, match="outside"):
        current_metadata()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norm_over_all_heads(world_size: int) -> None:
    """Oracle: one norm over the whole width, as OLMo 2 has it; 4 ranks hold each of the 2 KV heads twice."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    weights = torch.randn(32), torch.randn(16)
    expected = [
        F.rms_norm(heads.flatten(1), (heads[0].numel(),), weight, 1e-6).view_as(heads)
        for heads, weight in zip((query, key), weights, strict=True)
    ]

    def body(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        context = LayerContext(
            communicator=communicator, dtype=torch.float32, device=CPU, format_of=choose_formats(None)
        )
        norm = QKNorm(QkNormSpec(eps=1e-6, spans_heads=True), spec, as_stored, context=context)
        for parameter, weight in zip((norm.q_weight, norm.k_weight), weights, strict=True):
            (source,) = sources_of(parameter)
            parameter.copy_(weight[source.taken[0].start :][: source.taken[0].size])
        norm.finish_loading()
        assert norm.head_norm is None
        own, own_kv = 4 // world_size, max(1, 2 // world_size)
        first, first_kv = communicator.info.rank * own, communicator.info.rank * 2 // world_size
        mine = query[:, first : first + own], *(one[:, first_kv : first_kv + own_kv] for one in (key, value))
        heads = torch.cat(mine, 1)
        norm.normalise(heads)
        assert torch.equal(heads[:, -own_kv:], mine[2])
        torch.testing.assert_close(heads[:, own : own + own_kv], expected[1][:, first_kv : first_kv + own_kv])
        return heads[:, :own], heads[:, own : own + own_kv]

    found = run_ranks(world_size, body)
    torch.testing.assert_close(torch.cat([heads for heads, _ in found], 1), expected[0])


def test_joins() -> None:
    """Oracle: the formulas, with and without a norm on the output, and without a following norm."""
    norms = [Norm(NormSpec(name=name, eps=1e-5), 8, context=ALONE) for name in ("out", "next")]
    for norm in norms:
        norm.weight.copy_(torch.randn(8))
    part, residual = torch.randn(3, 8), torch.randn(3, 8)
    for out_norm in (None, norms[0]):
        for next_norm in (None, norms[1]):
            stream = residual.clone()
            found = Join(out_norm, next_norm, 0.5, context=ALONE)(part.clone(), stream)
            output = part if out_norm is None else F.rms_norm(part, (8,), out_norm.weight, 1e-5)
            total = residual + 0.5 * output
            torch.testing.assert_close(stream, total)
            torch.testing.assert_close(
                found, total if next_norm is None else F.rms_norm(total, (8,), next_norm.weight, 1e-5)
            )
            first = Join(out_norm, next_norm, 1.0, context=ALONE)(None, residual)
            torch.testing.assert_close(
                first, residual if next_norm is None else F.rms_norm(residual, (8,), next_norm.weight, 1e-5)
            )


@pytest.mark.parametrize("world_size", [1, 2])
def test_join_writes_codes_for_its_readers(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the join itself, whose rows then become codes: first, after an all-reduce, and after an output's norm.

    Up to the readers' number of rows, and without readers that want codes, it gives rows.
    """
    wanted = WantedCodes(CodeRule(), more_than=2)
    monkeypatch.setattr(residual, "wanted_codes", lambda products: wanted if products else None)
    monkeypatch.setattr(ops, "native_library", lambda: None)
    ops.op.cache_clear()

    def body(communicator: Communicator) -> None:
        context = LayerContext(
            communicator=communicator, dtype=torch.bfloat16, device=CPU, format_of=choose_formats(None)
        )
        out_norm, next_norm = (Norm(NormSpec(name=name, eps=1e-5), 8, context=context) for name in ("out", "next"))
        reader = RowParallelLinear(8, 8, bias=False, context=context)
        for parameter in (out_norm.weight, next_norm.weight, *reader.parameters()):
            parameter.fill_(0.75)
        reader.finish_loading()
        generator = torch.Generator().manual_seed(communicator.info.rank)
        for num_rows in (2, 3):
            stream = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(9)).bfloat16()
            part = torch.randn(num_rows, 8, generator=generator).bfloat16()
            for output, own in ((None, None), (None, part), (out_norm, part)):
                join = Join(output, next_norm, 0.5, [reader], context=context)
                rest, expected_rest = stream.clone(), stream.clone()
                found = join.for_readers(None if own is None else own.clone(), rest)
                expected = join(None if own is None else own.clone(), expected_rest)
                assert torch.equal(rest, expected_rest) and isinstance(found, RowCodes) == (num_rows > 2)
                if isinstance(found, RowCodes):
                    codes, scales = quantise_rows(expected)
                    assert torch.equal(found.codes.float(), codes.float()) and torch.equal(found.scales, scales)
                else:
                    assert isinstance(found, torch.Tensor) and torch.equal(found, expected)
        plain = Join(None, next_norm, 0.5, context=context).for_readers(part, stream)
        assert isinstance(plain, torch.Tensor)

    run_ranks(world_size, body)
    ops.op.cache_clear()
