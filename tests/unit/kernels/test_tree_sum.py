"""Products whose columns are added as a tree of shards: the same bits on 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.kernels.kernel_cases_experts import RELU2, make_ids, make_weights
from tests.unit.kernels.kernel_cases_layer_ops import random
from tp_engine.config import EngineConfig
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import PackedWeight
from tp_engine.errors import ConfigError
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.linear.tree_sum import mix_experts_tree, tree_linear, tree_sum
from tp_engine.model_config import read_model
from tp_engine.model_config.mlp import Activation
from tp_engine.model_config.tp_invariant import NUM_SHARDS, WORLD_SIZES, check_tp_invariant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (
    16,
    240,
    1088,
    10256,
)  # a pair per shard; several shards per chunk, all shards in one, several chunks per shard
ROWS = (1, 3, 7, 65, 140)


@pytest.fixture
def library() -> ctypes.CDLL:
    library = native_library()
    if library is None:
        pytest.skip("the native kernels cannot be built here")
    return library


def test_the_tree() -> None:
    """Oracle: sums by hand that rounding tells apart from those from left to right."""
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert tree_sum([large, one, one, one]).item() == 2.0**24 + 2
    assert tree_sum([large, one, one]).item() == 2.0**24 + 1 - 1
    assert tree_sum([one]) is one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_product_has_the_same_bits_on_any_number_of_ranks(
    library: ctypes.CDLL, columns: int, dtype: torch.dtype
) -> None:
    """Oracle: the ranks' parts, added as a tree and rounded once; and the twin, up to rounding of float32."""
    weight, bias = random((150, columns), dtype, "cpu", 1), random((150,), dtype, "cpu", 2)
    whole = PackedWeight(library, weight, num_shards=NUM_SHARDS)
    for rows in ROWS:
        x = random((rows, columns), dtype, "cpu", rows)
        found = whole(x, bias)
        twin = tree_linear(x, weight, bias, NUM_SHARDS, keeps_sums=False)
        torch.testing.assert_close(found, twin, rtol=2 * torch.finfo(dtype).eps, atol=columns * 1e-6)
        for world_size in WORLD_SIZES:
            parts = []
            for rank, own in enumerate(weight.chunk(world_size, 1)):
                share = PackedWeight(library, own.contiguous(), num_shards=NUM_SHARDS // world_size, keeps_sums=True)
                parts.append(share(x.chunk(world_size, 1)[rank], bias if rank == 0 else None))
            assert torch.equal(tree_sum(parts).to(dtype), found), (world_size, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_s_bits_depend_on_nothing_else(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Oracle: its own result: with one thread and three, alone or in a batch, equal bit by bit."""
    for columns in (1088, 10256):
        x, weight = random((200, columns), dtype, "cpu", 1), random((131, columns), dtype, "cpu", 2)
        product = PackedWeight(library, weight, num_shards=NUM_SHARDS)
        torch.set_num_threads(1)
        whole = product(x, None)
        torch.set_num_threads(3)
        assert torch.equal(product(x, None), whole)
        for row in (0, 17, 199):
            assert torch.equal(product(x[row : row + 1], None), whole[row : row + 1])


def share_of(weights: ExpertWeights[torch.Tensor], rank: int, world_size: int) -> ExpertWeights[torch.Tensor]:
    """A rank's part of each expert; the first rank adds the down bias."""

    def own(both: torch.Tensor) -> torch.Tensor:
        parts = both.chunk(weights.activation.num_parts, 1)
        return torch.cat([part.chunk(world_size, 1)[rank] for part in parts], 1).contiguous()

    return replace(
        weights,
        gate_up=own(weights.gate_up),
        down=weights.down.chunk(world_size, 2)[rank].contiguous(),
        gate_up_bias=None if weights.gate_up_bias is None else own(weights.gate_up_bias),
        down_bias=weights.down_bias if rank == 0 else None,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bias", "activation"), [(False, None), (True, None), (True, RELU2)])
def test_experts_have_the_same_bits_on_any_number_of_ranks(
    library: ctypes.CDLL, bias: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    """Oracle: the ranks' parts, added as a tree and rounded once; and the twin, up to rounding."""
    weights = make_weights(6, 72, 96, dtype, "cpu", bias=bias, activation=activation)
    for rows in (1, 90):
        x, ids = random((rows, 72), dtype, "cpu"), make_ids("spread", rows, 3, 6, "cpu")
        shares = random((rows, 3), torch.float32, "cpu", 5).sigmoid()
        found = NativeExperts(library, weights, 3, num_shards=NUM_SHARDS)(x, ids, shares)
        twin = mix_experts_tree(x, ids, shares, weights, NUM_SHARDS, keeps_sums=False)
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, twin, rtol=tolerance, atol=tolerance * twin.abs().max().item())
        for world_size in WORLD_SIZES:
            shard_counts = {"num_shards": NUM_SHARDS // world_size}
            parts = [
                NativeExperts(library, share_of(weights, rank, world_size), 3, None, keeps_sums=True, **shard_counts)(
                    x, ids, shares
                )
                for rank in range(world_size)
            ]
            assert torch.equal(tree_sum(parts).to(dtype), found), (world_size, rows)


QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
RESOLVED = EngineConfig(
    model="m", device="cpu", dtype="bfloat16", attention_backend="native", tensor_parallel_size=2, tp_invariant=True
)


def test_what_is_refused() -> None:
    """Oracle: the rule by hand: each refusal names the value, and numbers of ranks come with the legal ones."""
    model = read_model(QWEN3)
    for world_size in WORLD_SIZES:
        check_tp_invariant(replace(RESOLVED, tensor_parallel_size=world_size), model)
    refused: list[tuple[EngineConfig, dict[str, Any], str]] = [
        (
            RESOLVED,
            {"intermediate_size": 104},
            "the intermediate size of this Qwen3ForCausalLM, 104, is not a multiple",
        ),
        (RESOLVED, {"num_attention_heads": 2, "head_dim": 12}, "the width of all heads of this"),
        (RESOLVED, {"architectures": ["Olmo2ForCausalLM"]}, "normalises all heads together"),
        (replace(RESOLVED, quantization="int8"), {}, "quantization is int8"),
        (replace(RESOLVED, attention_backend="torch"), {}, "attention_backend is torch"),
        (replace(RESOLVED, enable_expert_parallel=True), {}, "enable_expert_parallel"),
        (replace(RESOLVED, enable_lora=True), {}, "enable_lora"),
        (replace(RESOLVED, enable_lora=True), {}, "enable_lora is too"),
        (replace(RESOLVED, tensor_parallel_size=3), {}, "on 1, 2, 4, 8 ranks: choose"),
        (replace(RESOLVED, tensor_parallel_size=8), {"num_attention_heads": 4}, "on 1, 2, 4 ranks: choose"),
    ]
    for config, changes, message in refused:
        with pytest.raises(ConfigError, match=message):
            check_tp_invariant(config, read_model({**QWEN3, **changes}))
