"""Which part of which tensor a rank reads: pure arithmetic, and the descriptions of a model's parameters."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.unit.model_config.test_model_config import QWEN3_06B, llama
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.job.topology import RankInfo
from tp_engine.layers.rotary import interleaved_to_halves
from tp_engine.model_config import padded_vocab_size, read_model
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.weights.source import Source, Span, equal_share, kv_head_share, sources_of, times, vocab_share


class Somewhere:
    """A communicator that only knows its rank."""

    can_capture = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.info = RankInfo(rank=rank, world_size=world_size)


def sources(spec: ModelSpec, rank: int, world_size: int) -> dict[str, list[Source]]:
    """The sources of each parameter of one rank; built on the meta device, without memory."""
    model = build_model(
        spec,
        communicator=Somewhere(rank, world_size),  # type: ignore[arg-type]
        dtype=torch.float32,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(spec.kv_layout.groups),
        max_model_len=16,
    )
    return {name: list(sources_of(parameter)) for name, parameter in model.named_parameters()}


def test_golden_shares() -> None:
    """Oracle: worked out by hand."""
    assert equal_share(12, 2, 3) == Span(8, 4)
    assert times(Span(2, 3), 16) == Span(32, 48)
    with pytest.raises(AssertionError, match="13 is not divisible by 3"):
        equal_share(13, 0, 3)


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
    """Oracle: the drawings of the sharding rule."""
    for rank, heads in enumerate(held):
        assert kv_head_share(num_heads, rank, world_size) == Span(heads[0], len(heads))


def test_each_query_head_finds_its_kv_head() -> None:
    """Oracle: grouped-query attention pairs query head h with KV head h // (H / K); both must live on the same rank."""
    for num_heads, num_kv_heads in ((32, 8), (8, 2), (6, 3), (12, 1), (64, 8)):
        for world_size in range(1, num_heads + 1):
            if num_heads % world_size or (num_kv_heads % world_size and world_size % num_kv_heads):
                continue
            for rank in range(world_size):
                query, kv = equal_share(num_heads, rank, world_size), kv_head_share(num_kv_heads, rank, world_size)
                group = query.size // kv.size
                for local in range(query.size):
                    assert (query.start + local) // (num_heads // num_kv_heads) == kv.start + local // group


@pytest.mark.parametrize(("vocab_size", "world_size"), [(203, 1), (203, 2), (203, 8), (17, 8), (32000, 3), (64, 4)])
def test_the_vocabulary_is_covered_once(vocab_size: int, world_size: int) -> None:
    """Oracle: the ranks' rows, joined, are the vocabulary."""
    room = padded_vocab_size(vocab_size, world_size) // world_size
    shares = [vocab_share(vocab_size, rank, room) for rank in range(world_size)]
    covered = [row for share in shares for row in range(share.start, share.start + share.size)]
    assert covered == list(range(vocab_size))
    assert max(share.size for share in shares) <= room


@pytest.mark.parametrize("config", [QWEN3_06B, llama(attention_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_ranks_read_everything_once(config: dict[str, Any], world_size: int) -> None:
    """Oracle: counting elements; only KV heads and whole tensors are read by more than one rank."""
    spec = read_model({**config, "num_hidden_layers": 2})
    read: Counter[str] = Counter()
    sizes = {}
    for rank in range(world_size):
        for source in (one for found in sources(spec, rank, world_size).values() for one in found):
            read[source.name] += math.prod(span.size for span in source.taken)
            sizes[source.name] = math.prod(source.shape)
    copies = max(1, world_size // spec.attentions[0].num_kv_heads)
    for name, size in sizes.items():
        shared = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        expected = world_size if shared else copies if ".k_proj" in name or ".v_proj" in name else 1
        assert read[name] == expected * size, name


def test_merged_parameters_are_filled_in_order() -> None:
    """Oracle: worked out by hand for Qwen3-0.6B on 2 of 4 ranks: 16 heads and 8 KV heads of 128."""
    found = sources(read_model(QWEN3_06B), 1, 4)
    attention = "model.layers.3.self_attn"
    parts = found["layers.3.self_attn.qkv_proj.weight"]
    assert [part.name for part in parts] == [f"{attention}.{letter}_proj.weight" for letter in "qkv"]
    assert [part.target[0].start for part in parts] == [0, 4 * 128, 4 * 128 + 2 * 128]
    assert parts[1].taken == (Span(256, 256), Span(0, 1024)) and parts[1].shape == (1024, 1024)
    assert [part.name for part in found["layers.3.self_attn.qk_norm.q_weight"]] == [f"{attention}.q_norm.weight"]
    assert found["layers.3.mlp.gate_up_proj.weight"][1].target[0].start == 3072 // 4
    assert "lm_head.weight" not in found


def test_fused_tensors_are_read_in_ranges() -> None:
    """Oracle: worked out by hand for Phi-3 on rank 1 of 2: 4 heads and 2 KV heads of 16, an inner size of 96."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    found = sources(read_model(llama(architectures=["Phi3ForCausalLM"], **sizes)), 1, 2)
    parts = found["layers.0.self_attn.qkv_proj.weight"]
    assert {part.name for part in parts} == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert [part.taken[0] for part in parts] == [Span(32, 32), Span(64 + 16, 16), Span(96 + 16, 16)]
    assert {part.shape for part in parts} == {(128, 64)}
    gate, up = found["layers.0.mlp.gate_up_proj.weight"]
    assert (gate.taken[0], up.taken[0], gate.shape) == (Span(48, 48), Span(96 + 48, 48), (192, 64))


def test_interleaved_pairs_become_halves() -> None:
    """Oracle: the order written out, for two heads of 6 of which 4 elements turn."""
    rows = torch.tensor([0, 10, 1, 11, 4, 5, 20, 30, 21, 31, 24, 25])
    assert interleaved_to_halves(rows, 6, 4).tolist() == [0, 1, 10, 11, 4, 5, 20, 21, 30, 31, 24, 25]
    assert torch.equal(interleaved_to_halves(rows[:, None], 6, 4)[:, 0], interleaved_to_halves(rows, 6, 4))
