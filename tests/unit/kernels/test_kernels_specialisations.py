"""Which values of a launch make Triton compile it anew: none that changes per step, because that takes seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.unit.kernels.kernel_cases_delta import launch_step
from tests.unit.kernels.kernel_cases_quantised import make_stack
from tests.unit.kernels.kernel_harness import compiled_for, needs_triton, quiet
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.experts.routing import ExpertLoad
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import OPS, implementation
from tp_engine.kernels.quantization.row_codes import CodeRule
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables, padded_room
from tp_engine.model_config.mlp import SILU, Activation, RoutingRule

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK_SIZE, MAX_ROWS = 1024, 16, 8, 128, 151_936, 16, 64


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_layer(num_tokens: int, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A layer's launches beside products and attention; returns its queries, a view of the merged heads."""
    embed, norm, add_norm, gate, qk_norm_rope_store = (
        implementation(name, "triton") for name in ("embed", "norm", "add_norm", "gate", "qk_norm_rope_store")
    )
    embed(empty(num_tokens, dtype=torch.int64), empty(VOCAB, HIDDEN), None)
    rule = NormRule(empty(HIDDEN), 1e-6)
    norm(empty(num_tokens, HIDDEN), rule)
    add_norm(empty(num_tokens, HIDDEN), empty(num_tokens, HIDDEN), rule)
    gate(empty(num_tokens, 6144), SILU)
    gains = empty(HEADS + KV_HEADS, HEAD_DIM)
    head_norm = HeadNorm(q_weight=empty(HEAD_DIM), k_weight=empty(HEAD_DIM), weights=gains, eps=1e-6)
    rotation = Rotation(empty(4096, HEAD_DIM), empty(num_tokens, dtype=torch.int64))
    merged = empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    query: torch.Tensor = qk_norm_rope_store(merged, KV_HEADS, head_norm, rotation, LayerKv(cache), slots)[0]
    return query


def launch_unusual_layer(num_tokens: int, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The same with every feature that most models lack, on one of eight ranks."""
    from tp_engine.kernels.distributed.gather_triton import all_gather_triton

    ops = {name: implementation(name, "triton") for name, one in OPS.items() if one.triton is not None}
    x, residual = empty(num_tokens, HIDDEN), empty(num_tokens, HIDDEN)
    rule = NormRule(empty(HIDDEN), 1e-6, offset=1.0, is_centred=True)
    ops["embed"](empty(num_tokens, dtype=torch.int64), empty(VOCAB // 8, HIDDEN), VOCAB // 8, 32.0)
    ops["norm"](x, rule)
    ops["add_norm"](x, residual, rule, 0.22)
    ops["add"](x, residual, 0.22)
    ops["norm_codes"](x, residual, rule, CodeRule(group=128), 0.22)
    addresses = empty(8, dtype=torch.int64)
    all_gather_triton(empty(num_tokens, dtype=torch.int64), buffers=addresses, signals=addresses, rank=1)
    ops["gate"](empty(num_tokens, 6144), Activation("gelu_tanh"))
    ops["gate_heads"](empty(num_tokens, 4096), empty(num_tokens, 3 * 4096)[:, 8192:])
    ops["gate_heads"](empty(num_tokens, 4096), empty(num_tokens, 8224)[:, 8192:], "softplus")
    ops["cap_logits"](empty(num_tokens, VOCAB // 8), 0.5, 30.0)
    merged, gains = empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), empty(HEADS + KV_HEADS, HEAD_DIM)
    squares = ops["head_squares"](merged, HEADS, KV_HEADS)
    ops["norm_width"](merged, HEADS, KV_HEADS, squares, gains, (8 * HEADS * HEAD_DIM, 8 * KV_HEADS * HEAD_DIM), 1e-6)
    norm = HeadNorm(q_weight=gains[0], k_weight=gains[-1], weights=gains, eps=1e-6, offset=1.0)
    scale = empty(4096, dtype=torch.float32)
    rotation = Rotation(empty(4096, HEAD_DIM // 4), empty(num_tokens, dtype=torch.int64), scale)
    ops["qk_norm_rope_store"](merged, KV_HEADS, norm, None, LayerKv(cache), slots)
    query: torch.Tensor = ops["qk_norm_rope_store"](merged, KV_HEADS, norm, rotation, LayerKv(cache), slots)[0]
    return query


def launch_attention(
    query: torch.Tensor, cache: torch.Tensor, num_decodes: int, num_chunks: int, width: int, **rule: Any
) -> None:
    """Decodes, then chunks of the remaining tokens; block tables of ``width`` columns."""
    from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS, decode_sizes, paged_decode_triton
    from tp_engine.kernels.attention.paged_prefill_triton import paged_prefill_triton, prefill_sizes

    num_requests = num_decodes + num_chunks
    table, seq_lens = empty(num_requests, width, dtype=torch.int32), empty(num_requests, dtype=torch.int32)
    out: Any = empty(len(query), HEADS, HEAD_DIM)
    if num_decodes:
        sizes = decode_sizes(num_decodes, KV_HEADS, HEAD_DIM, 2, 132)
        part = (query[:num_decodes], LayerKv(cache), table[:num_decodes], seq_lens[:num_decodes], out[:num_decodes])
        paged_decode_triton(*part, sizes=sizes, scale=0.1, arrivals=empty(MAX_ARRIVALS, dtype=torch.int32), **rule)
    if num_chunks:
        place: dict[str, Any] = {"num_queries": len(query) - num_decodes, "first_request": num_decodes, **rule}
        starts, sizes_of_chunks = empty(num_requests + 1, dtype=torch.int32), prefill_sizes(HEAD_DIM, 2)
        # The prefills of a pair begin at any request, so at any address.
        if num_decodes % 2:
            table, seq_lens, starts = (one.as_strided(one.shape, one.stride(), 1) for one in (table, seq_lens, starts))
        paged_prefill_triton(
            query, LayerKv(cache), table, seq_lens, starts, out, sizes=sizes_of_chunks, scale=0.1, **place
        )


def launch_decode_inputs_and_sampling(num_rows: int, slots: torch.Tensor) -> None:
    """The other launches of a step of ``num_rows`` decodes, whose ``slots`` (G, N) precede those of prefills."""
    from tp_engine.kernels.sampling import (
        candidates_triton,
        filter_triton,
        nucleus_ranks_triton,
        nucleus_triton,
        ranked_ranks_triton,
    )
    from tp_engine.kernels.sampling.best_triton import best_tokens_triton

    tables = RowTables(
        token_ids=empty(MAX_ROWS, 4097, dtype=torch.int32),
        num_computed=empty(MAX_ROWS, dtype=torch.int32),
        block_table=empty(len(slots), MAX_ROWS, 256, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )
    inputs = DecodeInputs.allocate(MAX_ROWS, tables).first(num_rows)
    prepare, advance = (implementation(name, "triton") for name in ("prepare_decodes", "advance_decodes"))
    prepare(tables, inputs)
    prepare(tables, dataclasses.replace(inputs, slot_mapping=slots[:, :num_rows]))
    advance(tables, inputs, empty(num_rows, dtype=torch.int32))
    rows, positions = empty(num_rows, dtype=torch.int32), empty(num_rows, dtype=torch.int64)
    logits, sampling = empty(num_rows, VOCAB), SamplingTables.empty(1024, torch.device("meta"))
    best_tokens_triton(logits, rows, positions, sampling, first_id=0)
    best_tokens_triton(logits, inputs.rows, inputs.positions, sampling, first_id=0, advanced=tables)
    best = best_tokens_triton(logits, rows, positions, sampling, first_id=0, ranked_below=VOCAB, finds_maxima=True)
    nucleus_triton.draw_nucleus_triton(logits, rows, positions, sampling, best)
    filter_triton.top_keys_triton(logits, rows, sampling, first_id=0, width=64)
    candidates_triton.draw_ranked_triton(logits, rows, positions, sampling, best.token_ids)
    part: dict[str, Any] = {"first_id": VOCAB // 8, "vocab_size": VOCAB}
    own = (logits[:, : VOCAB // 8], rows, positions, sampling)
    nucleus_ranks_triton.front_share_triton(empty(num_rows, 64, dtype=torch.int64), *own, **part)
    front, _ = nucleus_ranks_triton.weigh_fronts_triton(empty(8, num_rows, 64, dtype=torch.int64), *own, **part)
    sums = empty(8, num_rows, 65, dtype=torch.int64)
    nucleus_ranks_triton.choose_of_fronts_triton(best.token_ids, front, sums, rows, sampling, vocab_size=VOCAB)
    shares = empty(8, num_rows, 64, dtype=torch.int64)
    ranked_ranks_triton.draw_of_shares_triton(best.token_ids, shares, rows, positions, sampling, vocab_size=VOCAB)


@needs_triton
@quiet
@pytest.mark.parametrize("num_groups", [1, 3])
def test_no_size_of_a_batch_compiles_a_kernel_anew(num_groups: int) -> None:
    """Oracle: Triton's own cache: three steps cover all numbers of splits, and no later step adds to it."""
    cache = empty(2, 100, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    rule: dict[str, Any] = {"window": 128, "softcap": 50.0, "sinks": empty(HEADS, dtype=torch.float32)}

    def step(num_decodes: int, num_chunks: int, num_tokens: int, width: int) -> None:
        slots = empty(num_groups, padded_room(num_tokens, num_groups), dtype=torch.int64)[:, :num_tokens]
        for own in slots.unbind():
            launch_attention(launch_layer(num_tokens, cache, own), cache, num_decodes, num_chunks, width)
            queries = launch_unusual_layer(num_tokens, cache, own)
            launch_attention(queries, cache, num_decodes, num_chunks, width, **rule)
        launch_decode_inputs_and_sampling(num_decodes or 1, slots)
        launch_step(num_decodes)

    with compiled_for(90) as kernels:
        for num_decodes in (2, 40, 1024):
            step(num_decodes, 3, num_decodes + 70, 5)
        known = {id(kernel) for kernel in kernels}
        for num_decodes in (0, 1, 2, 16, 17, 32, 64, 300):
            for num_chunks, num_tokens, width in ((0, 0, 1), (1, 1, 16), (1, 16, 7), (16, 99, 48)):
                if num_decodes + num_tokens:
                    step(num_decodes, num_chunks, num_decodes + num_tokens, width)
        added = [kernel.name for kernel in kernels if id(kernel) not in known]
    assert not added, f"compiled for a size: {sorted(set(added))}"


def launch_experts(num_tokens: int) -> None:
    """Routing, experts, the same with quantised weights, and a gated shared MLP of a layer like gpt-oss-20b's on one of
    four ranks."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    num_experts, hidden, inner = 32, 2880, 736
    weights = ExpertWeights(
        gate_up=empty(num_experts, 2 * inner, hidden),
        down=empty(num_experts, hidden, inner),
        gate_up_bias=empty(num_experts, 2 * inner),
        down_bias=empty(num_experts, hidden),
        first=0,
        activation=Activation("swiglu_clamped"),
    )
    load = ExpertLoad(empty(num_experts, dtype=torch.int64), empty(num_tokens, dtype=torch.int64))
    rule, logits = RoutingRule(top_k=4, scores="softmax_of_chosen"), empty(num_tokens, num_experts + 1)
    x = empty(num_tokens, hidden)
    ids, shares = implementation("route", "triton")(logits[:, :num_experts], rule, None, load)
    TritonExperts(weights)(x, ids, shares)
    packed: dict[str, Any] = {"group": 32, "scales": torch.float8_e8m0fnu}
    quantised = ExpertWeights(
        gate_up=make_stack("e2m1", (num_experts, 2 * inner, hidden), **packed),
        down=make_stack("e2m1", (num_experts, hidden, inner), **packed),
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        first=0,
        activation=weights.activation,
    )
    TritonExperts(quantised)(x, ids, shares)
    implementation("add_gated", "triton")(x, x, logits[:, num_experts:])


@needs_triton
@quiet
@pytest.mark.slow
def test_no_number_of_tokens_compiles_experts_anew() -> None:
    """Oracle: Triton's own cache: after a step for each line of the table of tiles, no step adds to it."""
    with compiled_for(90) as kernels:
        for num_tokens in (3, 100, 700, 2000):
            launch_experts(num_tokens)
        known = {id(kernel) for kernel in kernels}
        for num_tokens in (1, 2, 16, 17, 64, 65, 256, 257, 1024, 1025, 4096):
            launch_experts(num_tokens)
        added = [kernel.name for kernel in kernels if id(kernel) not in known]
    assert not added, f"compiled for a size: {sorted(set(added))}"
