"""Which part of which tensor a rank reads: pure arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.unit.test_model_config import QWEN3_06B, llama
from tp_engine.layers.embedding import padded_vocab_size
from tp_engine.model_config import ModelConfig
from tp_engine.weights.layout import Layout
from tp_engine.weights.shard import Shard, Split, shard_of


def layout(config: ModelConfig, rank: int, world_size: int) -> Layout:
    rows = padded_vocab_size(config.vocab_size, world_size) // world_size
    return Layout(config, rank=rank, world_size=world_size, vocab_rows=rows)


def test_golden_shards() -> None:
    """Oracle: worked out by hand."""
    assert shard_of(Split.COLUMN, (12, 5), rank=2, world_size=3) == Shard(dim=0, start=8, size=4, room=4)
    assert shard_of(Split.ROW, (12, 6), rank=1, world_size=3) == Shard(dim=1, start=2, size=2, room=2)
    assert shard_of(Split.WHOLE, (12,), rank=1, world_size=3) == Shard(dim=0, start=0, size=12, room=12)


@pytest.mark.parametrize(
    ("num_heads", "world_size", "held"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
        (3, 3, [[0], [1], [2]]),
        (8, 1, [list(range(8))]),
    ],
)
def test_kv_heads(num_heads: int, world_size: int, held: list[list[int]]) -> None:
    """Oracle: the drawings of the sharding rule; head_dim 16."""
    for rank, heads in enumerate(held):
        shard = shard_of(Split.KV_HEADS, (num_heads * 16, 64), rank=rank, world_size=world_size, num_kv_heads=num_heads)
        assert (shard.start, shard.size) == (heads[0] * 16, len(heads) * 16)


def test_each_query_head_finds_its_kv_head() -> None:
    """Oracle: grouped-query attention pairs query head h with KV head h // (H / K); both must live on the same rank."""
    for num_heads, num_kv_heads in ((32, 8), (8, 2), (6, 3), (12, 1), (64, 8)):
        for world_size in range(1, num_heads + 1):
            if num_heads % world_size or (num_kv_heads % world_size and world_size % num_kv_heads):
                continue
            for rank in range(world_size):
                query = shard_of(Split.COLUMN, (num_heads,), rank=rank, world_size=world_size)
                kv = shard_of(
                    Split.KV_HEADS, (num_kv_heads,), rank=rank, world_size=world_size, num_kv_heads=num_kv_heads
                )
                group = query.size // kv.size
                for local in range(query.size):
                    assert (query.start + local) // (num_heads // num_kv_heads) == kv.start + local // group


@pytest.mark.parametrize(("vocab_size", "world_size"), [(203, 1), (203, 2), (203, 8), (17, 8), (32000, 3), (64, 4)])
def test_the_vocabulary_is_covered_once(vocab_size: int, world_size: int) -> None:
    """Oracle: the ranks' rows, joined, are the vocabulary; all ranks have equal room."""
    rows = padded_vocab_size(vocab_size, world_size) // world_size
    shards = [
        shard_of(Split.VOCAB, (vocab_size, 8), rank=rank, world_size=world_size, vocab_rows=rows)
        for rank in range(world_size)
    ]
    covered = [row for shard in shards for row in range(shard.start, shard.start + shard.size)]
    assert covered == list(range(vocab_size))
    assert {shard.room for shard in shards} == {rows}


@pytest.mark.parametrize("config", [QWEN3_06B, llama(attention_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_ranks_read_everything_once(config: dict[str, Any], world_size: int) -> None:
    """Oracle: counting elements; only KV heads and whole tensors are read by more than one rank."""
    model = ModelConfig.from_dict(config)
    read: Counter[str] = Counter()
    sizes = {}
    for rank in range(world_size):
        for placement in layout(model, rank, world_size).placements:
            read[placement.name] += placement.shard.size
            sizes[placement.name] = placement.shape[placement.shard.dim]
    copies = max(1, world_size // model.num_kv_heads)
    for name, size in sizes.items():
        shared = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        expected = world_size if shared else copies if ".k_proj" in name or ".v_proj" in name else 1
        assert read[name] == expected * size, name


def test_merged_parameters_are_filled_in_order() -> None:
    """Oracle: worked out by hand for Qwen3-0.6B on 2 of 4 ranks: 16 heads and 8 KV heads of 128."""
    model = ModelConfig.from_dict(QWEN3_06B)
    found = {placement.name: placement for placement in layout(model, 1, 4).placements}
    attention = "model.layers.3.self_attn"
    offsets = [found[f"{attention}.{letter}_proj.weight"].offset for letter in "qkv"]
    assert offsets == [0, 4 * 128, 4 * 128 + 2 * 128]
    assert found[f"{attention}.k_proj.weight"].shard == Shard(dim=0, start=256, size=256, room=256)
    assert found[f"{attention}.q_norm.weight"].parameter == "layers.3.self_attn.qk_norm.q_weight"
    assert found["model.layers.3.mlp.up_proj.weight"].offset == 3072 // 4
    assert "lm_head.weight" not in found


def test_extras_that_may_be_skipped() -> None:
    """Oracle: the explicit rule: inverse frequencies always, a head only where it is tied."""
    tied, free = (layout(ModelConfig.from_dict(config), 0, 1) for config in (QWEN3_06B, llama()))
    assert tied.is_harmless("lm_head.weight") and not free.is_harmless("lm_head.weight")
    assert free.is_harmless("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not free.is_harmless("model.layers.0.self_attn.q_norm.weight")
