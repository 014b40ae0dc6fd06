"""Latent attention: its two forms, its cache, and what published configurations become."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from tests.paged_batches import make_batch
from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, error_of
from tests.unit.model_config.test_quantization_config import BLOCK_FP8
from tp_engine.attention import expanded, mla, native_backend
from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.mla import MLABackend, TokenSelection, part_of_step
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.registry import check_backend, select_backend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import EngineConfig
from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import PackedWeight
from tp_engine.errors import ConfigError
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.latents import HEADS_TOGETHER, absorb_w_uk, prepare_latents, project_w_uv
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, layer_view, states_at, store_kv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import has_triton
from tp_engine.model_config import check_tensor_parallel, read_model, resolve_max_model_len
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.model_config.mla import MLASpec
from tp_engine.models.weight_sizes import local_parameters
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape

# Keys of published files.  transformers' defaults confirm V3, V3.2, GLM-4.7-Flash and Mistral Small 4; the numbers of
# parameters that the publishers name confirm the sizes of all.
YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "pretraining_tp": 1, "ep_size": 1,
}  # fmt: skip
V3 = {
    **COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rope_scaling": YARN,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280,
}  # fmt: skip
FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
V2 = {
    **COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy",
    "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001,
}  # fmt: skip
V2_LITE = {
    **V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
KIMI_K2 = {
    **V3, "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 131072, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0}, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "vocab_size": 163840, "bos_token_id": 163584, "eos_token_id": 163585,
}  # fmt: skip
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False,
    "eos_token_id": [154820, 154827], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880, "dtype": "bfloat16",
}  # fmt: skip
SMALL_4 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16",
    "text_config": {
        "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "kv_lora_rank": 256,
        "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "n_routed_experts": 128,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_experts_per_tok": 4, "q_lora_rank": 1024,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128, "vocab_size": 131072,
        "rope_parameters": {
            "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "max_position_embeddings": 1048576, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
            "mscale": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5,
        },
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
V32 = {
    **V3, "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "model_type": "deepseek_v32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        (V3, 671, 38, 61 * 1152),
        (V2, 236, 21, 60 * 1152),
        (V2_LITE, 15.7, 2.7, 27 * 1152),
        (KIMI_K2, 1026, 33, 61 * 1152),
        (GLM_FLASH, 30, 3.9, 47 * 1152),
        (SMALL_4, 119, 6.6, 36 * 640),
        (V32, 671, 38, 61 * 1152),
    ],
    ids=["V3", "V2", "V2-Lite", "Kimi K2", "GLM-4.7-Flash", "Mistral Small 4", "V3.2"],
)
def test_sizes_of_published_models(config: dict[str, Any], billions: float, active: float, kv_bytes: int) -> None:
    """Oracle: the publishers' numbers of parameters, active ones with the embedding; bytes of the cache by hand: rows
    of 576 (Mistral: 320) numbers of bfloat16 in each layer, the same on every rank."""
    spec = read_model(config).within(2048)
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(billions, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(active, rel=0.03)
    for world_size in (1, 2, 4):
        check_tensor_parallel(spec, world_size)
        assert spec.kv_layout_on(world_size).block_bytes(16, 2) == 16 * kv_bytes


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (V3, "DeepseekV3Config"),
        (V32, "DeepseekV32Config"),
        (GLM_FLASH, "Glm4MoeLiteConfig"),
        (SMALL_4["text_config"], "Mistral4Config"),
    ],
    ids=["V3", "V3.2", "GLM-4.7-Flash", "Mistral Small 4"],
)
def test_configurations_are_those_of_transformers(config: dict[str, Any], name: str) -> None:
    """Oracle: transformers' defaults, which are the release's, but for these keys."""
    import transformers

    of_the_release = {"architectures", "dtype", "torch_dtype", "eos_token_id", "rope_parameters"}
    of_the_release |= {"max_position_embeddings"} if name == "DeepseekV3Config" else set()
    defaults = getattr(transformers, name)().to_dict()
    compared = (config.keys() & defaults.keys()) - of_the_release
    assert len(compared) > 15
    assert {key: config[key] for key in compared} == {key: defaults[key] for key in compared}


def test_what_deepseek_v3_becomes() -> None:
    """Oracle: the formulas of DeepSeek's own code: mscale 0.1 ln 40 + 1; blocks of 128 x 128; layer 61 is skipped."""
    spec = read_model({**V3, "quantization_config": FP8})
    first, last = spec.attentions[0], spec.layers[-1]
    assert first.latent == MLASpec(rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536)
    assert first.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert spec.ropes[0].is_interleaved and spec.ropes[0].attention_factor == 1.0
    assert [layer.experts is None for layer in spec.layers[:4]] == [True, True, True, False]
    assert last.experts is not None and last.experts.shared is not None
    rule = last.experts.rule
    assert (rule.num_groups, rule.top_groups, rule.group_best, rule.factor) == (8, 4, 2, 2.5)
    predicted = {"model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"}
    assert spec.names.mtp_names({"model.layers.60.mlp.gate.weight", *predicted}, spec.num_layers) == predicted
    modules = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    assert {spec.scheme_of(f"model.layers.4.self_attn.{name}") for name in modules} == {BLOCK_FP8}


def test_twenty_heads_name_the_legal_numbers_of_ranks() -> None:
    """Oracle: the divisors of 20 heads that also divide the inner sizes 10240 and 1536."""
    with pytest.raises(ConfigError, match=r"20 attention heads .*Glm4MoeLiteForCausalLM: 1, 2, 4$"):
        check_tensor_parallel(read_model(GLM_FLASH), 8)


def test_sparse_attention_is_dense_up_to_index_topk() -> None:
    """Oracle: with as many keys as ``index_topk``, the indexer selects all of them."""
    spec = read_model(V32)
    assert resolve_max_model_len(spec, None) == 163840
    assert "model.layers.60.self_attn.indexer." in spec.names.skipped
    short, long = spec.within(2048), spec.within(2049)
    assert (short.index_topk, long.index_topk) == (None, 2048) and short.warnings == ()
    assert "2,048 keys" in long.warnings[-1] and "max_model_len 2048" in long.warnings[-1]
    assert short.kv_layout == read_model(V3).kv_layout and read_model(V3).within(4096) == read_model(V3)


GLM_52 = {
    **GLM_FLASH, "architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 6144, "num_attention_heads": 64,
    "num_key_value_heads": 64, "num_hidden_layers": 78, "q_lora_rank": 2048, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "index_n_heads": 32, "indexer_rope_interleave": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "indexed", "token_bytes"),
    [
        (V32, list(range(61)), 85_888),
        ({**GLM_52, "index_topk_freq": 1}, list(range(78)), 109_824),
        (GLM_52, [0, 1, *range(2, 78, 4)], 95_232),
        ({**GLM_52, "indexer_types": ["full"] + ["shared"] * 77}, [0], 78 * 1152 + 256),
        ({**GLM_52, "index_topk_pattern": "F" + "FS" * 38 + "S"}, [0, *range(1, 77, 2)], 78 * 1152 + 39 * 256),
    ],
    ids=["V3.2", "GLM-5", "GLM-5.2", "types", "pattern"],
)
def test_index_keys_lie_behind_the_latents(config: dict[str, Any], indexed: list[int], token_bytes: int) -> None:
    """Oracle: by hand, bytes of a token: 576 numbers in each layer, 128 in each with an indexer, of 2 bytes; blocks are
    a little larger, so that both are counted in whole rows."""
    spec = read_model(config)
    (group,) = spec.kv_layout.groups
    assert list(group.index_layers) == indexed and group.index_dim == 128
    block = spec.kv_layout.block_bytes(16, 2)
    assert 0 <= block - 16 * token_bytes < 1152 * 2 and block % 1152 == 0
    fp8 = spec.kv_layout.block_bytes(16, 1, has_scales=True)
    assert fp8 == 16 * (token_bytes // 2 + 4 * (spec.num_layers + len(indexed)))
    sources = [one.latent.index.source for one in spec.attentions if one.latent is not None and one.latent.index]
    assert [index for index, source in enumerate(sources) if source is None] == indexed
    assert all(source is None or source == max(i for i in indexed if i < n) for n, source in enumerate(sources))


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (V3, {"attention_bias": True}, "attention_bias"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"surprise": 3}, "surprise=3"),
        (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (V32, {"q_lora_rank": None}, "q_lora_rank"),
        (V32, {"index_head_dim": 32}, "index_head_dim is 32"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"topk_method": "noaux_tc"}, "group_limited_greedy"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (GLM_FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    """Oracle: the rule that the reader ignores no option of config.json."""
    with pytest.raises(ConfigError, match=named):
        read_model({**config, **changes})


NEEDS = AttentionNeeds(
    device_type="cpu",
    dtype=torch.float32,
    kv_cache_dtype=torch.float32,
    block_size=16,
    head_dims=(576,),
    has_latents=True,
)


def test_backends_without_latents_are_refused() -> None:
    """Oracle: the table of backends; ``auto`` takes one that has them."""
    on_gpu = replace(NEEDS, device_type="cuda", dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"flash_attn: the model has latent attention.*=triton or native or torch"):
        check_backend("flash_attn", on_gpu)
    assert check_backend("auto", on_gpu) == ("triton" if has_triton() else "torch")
    assert check_backend("auto", replace(on_gpu, head_dims=(578,))) == "torch"
    assert check_backend("auto", replace(on_gpu, capability=(7, 5))) == "torch"
    with pytest.raises(ConfigError, match="head_dim is 576; it takes at most 512"):
        check_backend("triton", replace(on_gpu, has_latents=False))
    if has_triton():
        chosen = select_backend("triton", on_gpu)
        assert isinstance(chosen, MLABackend) and chosen.can_capture_decodes and chosen.name == "triton"
    assert check_backend("auto", NEEDS) == ("torch" if native_library() is None else "native")
    assert check_backend("auto", replace(NEEDS, kv_cache_dtype=torch.int8)) == check_backend("auto", NEEDS)
    assert check_backend("auto", replace(NEEDS, head_dims=(578,))) == "torch"
    assert isinstance(select_backend("auto", NEEDS), MLABackend)


def test_a_lossy_codec_is_refused(tmp_path: Any) -> None:
    """Oracle: codecs know keys and values, not rows that are both."""
    from tests.tiny_models import make_checkpoint

    folder = make_checkpoint(tmp_path / "model", "deepseek-v2")
    options: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_offloading_size": 0.01}
    with pytest.raises(ConfigError, match=r"kv_offloading_codec is int8.*latents.*kv_offloading_codec=none"):
        resolve(EngineConfig(**options, kv_offloading_codec="int8"))
    assert resolve(EngineConfig(**options)).config.kv_offloading_codec == "none"


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_prepared_queries_and_rows(is_interleaved: bool) -> None:
    """Oracle: pairs as complex numbers, in float64; the latent divided by its root mean square."""
    rank, nope, rope, positions = 6, 3, 8, torch.tensor([0, 5, 9])
    angles = torch.outer(torch.arange(12.0), 0.5 ** torch.arange(rope // 2))
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), 1), positions, 1 + torch.arange(12.0) / 10)
    query, rows, weight = torch.randn(3, 2, nope + rope), torch.randn(3, rank + rope), torch.randn(rank)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        pairs = heads.view(3, -1, rope // 2, 2) if is_interleaved else heads.view(3, -1, 2, rope // 2).transpose(2, 3)
        turns = torch.polar(torch.ones(3, 1, rope // 2), angles[positions].unsqueeze(1))
        found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (found if is_interleaved else found.transpose(2, 3)).flatten(2)

    found, key = prepare_latents(query, rows, NormRule(weight, 1e-6), rotation, is_interleaved, None, positions)
    assert key is not None
    wanted = torch.cat((query[..., :nope], turned(query[..., nope:])), -1) * (1 + positions / 10).view(3, 1, 1)
    torch.testing.assert_close(found, wanted)
    latent_rows = rows[:, :rank]
    normed = latent_rows / (latent_rows.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(key[:, 0], torch.cat((normed, turned(rows[:, rank:]).squeeze(1)), 1))


class Maps:
    """``LatentMaps`` of one tensor ``up`` (heads, nope + value_dim, rank)."""

    def __init__(self, up: torch.Tensor, nope_dim: int, rope_dim: int) -> None:
        self.up, self.nope_dim, self.rope_dim = up, nope_dim, rope_dim
        self.query_dim, self.value_dim = nope_dim + rope_dim, up.shape[1] - nope_dim

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        return absorb_w_uk(query, self.up, self.nope_dim)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        return project_w_uv(attended, self.up, self.nope_dim)

    def up_project(self, latents: torch.Tensor, first_head: int) -> torch.Tensor:
        library, up = native_library(), self.up[first_head : first_head + HEADS_TOGETHER]
        assert library is not None
        return PackedWeight(library, up.flatten(0, 1))(latents, None).view(len(latents), -1, up.shape[1])

    def expand(self, latents: torch.Tensor, heads: slice) -> torch.Tensor:
        return torch.einsum("nr,hdr->nhd", latents, self.up[heads]).contiguous()


def expected(query: torch.Tensor, rows: torch.Tensor, maps: Maps, scale: float) -> torch.Tensor:
    """Queries, the last of all ``rows``, by the formulas of the paper, in float64."""
    rank = maps.up.shape[2]
    made = maps.expand(rows[:, 0, :rank], slice(None))
    key = torch.cat((made[..., : maps.nope_dim], rows[..., rank:].expand(-1, made.shape[1], -1)), -1)
    value = made[..., maps.nope_dim :]
    scores = torch.einsum("thd,nhd->htn", query, key) * scale
    position = torch.arange(len(rows))
    hidden = position > position[len(rows) - len(query) :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, value)


class TokenMaps(Maps):
    """Maps whose results do not depend on the number of tokens."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(TokenMaps, self).absorb(one) for one in query.split(1)])

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(TokenMaps, self).values(one) for one in attended.split(1)])


def differing_alone(inner: AttentionBackend, requests: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those ``requests`` (query length, sequence length) of a step, decodes first, that have other bits alone."""
    heads, (rank, nope, rope, value_dim) = 4, (24, 16, 8, 12)
    maps = TokenMaps(torch.randn(heads, nope + value_dim, rank) / rank**0.5, nope, rope)
    rows = AttentionShape(num_heads=heads, num_kv_heads=1, head_dim=rank + rope, scale=0.1, value_dim=rank, latent=maps)
    batch, backend = make_batch(requests, rows, block_size=4), MLABackend(inner)
    kv, query = LayerKv(batch.kv_cache[:1]), torch.randn(len(batch.query), heads, nope + rope)

    def attend(metadata: AttentionMetadata, tokens: TokenSelection) -> torch.Tensor:
        backend.prepare(metadata)
        new = batch.key[tokens]
        return backend.forward(query[tokens], KeyValue(new, new[..., :rank]), kv, metadata, rows)

    together = attend(batch.metadata, slice(len(query)))
    alone = (part_of_step(batch.metadata, np.array([index])) for index in range(len(requests)))
    return [
        request
        for request, (metadata, tokens) in zip(requests, alone, strict=True)
        if not torch.equal(attend(metadata, tokens), together[tokens])
    ]


# On each side of the length from which on chunks are expanded, fresh and behind cached tokens, in any order; numbers of
# queries differ, because PyTorch's backend attends for equal ones in one call.
ALL_KINDS = [(1, 17), (150, 150), (9, 21), (130, 170), (5, 40), (127, 200), (128, 131)]


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_request_has_the_same_bits_alone(name: str) -> None:
    """Oracle: each request in a step of its own, bit by bit; the others do not choose its form."""
    if name == "native" and native_library() is None:
        pytest.skip("the native kernels cannot be built here")
    assert differing_alone(TorchBackend() if name == "torch" else NativeBackend(), ALL_KINDS) == []


@pytest.mark.parametrize("sizes", [(24, 16, 8, 12), (512, 128, 64, 128)], ids=["small", "deepseek"])
@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    list(product(("torch", "native"), (torch.float32, torch.int8, torch.float8_e4m3fn))),
    ids=str,
)
def test_absorbed_equals_expanded(
    sizes: tuple[int, int, int, int], name: str, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the formulas in float64, to 1e-5; for an int8 cache, of what the cache gives back.

    A step with two decodes, a chunk behind cached tokens, a whole prompt and a token of padding.
    """
    rank, nope, rope, value_dim = sizes
    heads, block_size, scale = 3, 4, 0.3 / (nope + rope) ** 0.5
    query_lens, seq_lens = np.array([1, 1, 9, 5], np.int32), np.array([17, 6, 21, 5], np.int32)
    maps64 = Maps(torch.randn(heads, nope + value_dim, rank, dtype=torch.float64) / rank**0.5, nope, rope)
    maps = Maps(maps64.up.float(), nope, rope)
    shape_of_cache = KvCacheShape(
        layout=lay_out([KvKind(window=None, num_kv_heads=1, head_dim=rank + rope, num_parts=1)]),
        block_size=block_size,
        dtype=cache_dtype,
    )
    blocks = KvBlocks.allocate(shape_of_cache, 24, torch.device("cpu"))
    cache, scales = blocks.views[0]
    kv = LayerKv(layer_view(cache, 0), None if scales is None else layer_view(scales, 0))
    tables = torch.randperm(24).view(4, 6).int()
    rows = [torch.randn(int(length), 1, rank + rope) for length in seq_lens]
    slots = [tables[i, torch.arange(len(one)) // block_size].long() * block_size + torch.arange(len(one)) % block_size
             for i, one in enumerate(rows)]  # fmt: skip
    new = [len(one) - length for one, length in zip(rows, query_lens, strict=True)]
    for one, own, first in zip(rows, slots, new, strict=True):
        store_kv(KeyValue(one[:first], one[:first, :, :rank]), kv, own[:first])
    fresh = torch.cat([one[first:] for one, first in zip(rows, new, strict=True)] + [torch.zeros(1, 1, rank + rope)])
    metadata = AttentionMetadata(
        num_decodes=2,
        slot_mapping=torch.cat([own[first:] for own, first in zip(slots, new, strict=True)] + [torch.tensor([-1])]),
        block_table=tables,
        seq_lens=torch.from_numpy(seq_lens),
        query_start=torch.from_numpy(np.concatenate(([0], query_lens.cumsum())).astype(np.int32)),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
    )
    query = torch.randn(len(fresh), heads, nope + rope)
    shape = AttentionShape(
        num_heads=heads, num_kv_heads=1, head_dim=rank + rope, scale=scale, value_dim=rank, latent=maps
    )
    found = {}
    for form, least in (("absorbed", 1000), ("expanded", 1)):
        monkeypatch.setattr(mla, "MIN_EXPANDED_QUERIES", least)
        monkeypatch.setitem(expanded._MAX_EXPANDED_ELEMENTS, "cpu", 21 * 2 * (nope + rope + value_dim))
        backend = select_backend(name, NEEDS)
        backend.prepare(metadata)
        found[form] = backend.forward(query, KeyValue(fresh, fresh[..., :rank]), kv, metadata, shape)
        assert found[form].shape == (len(fresh), heads, value_dim) and not found[form][-1].any()
    start = 0
    for one, own, length in zip(rows, slots, map(int, query_lens), strict=True):
        kept = one if cache_dtype == torch.float32 else states_at(kv, 0, own)
        assert torch.allclose(kept, one, atol=0.3)
        wanted = expected(query[start : start + length].double(), kept.double(), maps64, scale)
        for result in found.values():
            torch.testing.assert_close(result[start : start + length].double(), wanted, rtol=0, atol=1e-5)
        start += length


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
@pytest.mark.parametrize("max_elements", [1, 1 << 23], ids=["few heads at once", "all heads at once"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_expanded_in_c(dtype: torch.dtype, bound: float, max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the formulas in float64; then itself, bit by bit: in chunks, with any number of threads.

    Several blocks of tokens, six heads, of which four share a product; sizes that no vector divides.
    """
    monkeypatch.setattr(native_backend, "_MAX_EXPANDED_ELEMENTS", max_elements)
    heads, rank, nope, rope, value_dim, num_keys = 6, 40, 22, 6, 18, 1101
    maps64 = Maps(torch.randn(heads, nope + value_dim, rank, dtype=torch.float64) / rank**0.5, nope, rope)
    maps = Maps(maps64.up.to(dtype), nope, rope)
    shape = AttentionShape(
        num_heads=heads, num_kv_heads=1, head_dim=rank + rope, scale=0.2, value_dim=rank, latent=maps
    )
    rows, query = torch.randn(num_keys, 1, rank + rope).to(dtype), torch.randn(num_keys, heads, nope + rope).to(dtype)
    backend = NativeBackend()
    found = backend.attend_expanded(query, rows, shape)
    exact = Maps(maps.up.double(), nope, rope)
    wanted = expected(query.double(), rows.double(), exact, shape.scale)
    assert (found.double() - wanted).abs().max() <= bound
    for threads, chunks in ((1, (0, 130, 650, 1101)), (3, (0, 1, 1101))):
        torch.set_num_threads(threads)
        for first, end in pairwise(chunks):
            assert torch.equal(backend.attend_expanded(query[first:end], rows[:end], shape), found[first:end])


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 5, 20, 80])
@pytest.mark.parametrize("sizes", [(24, 6), (512, 64)], ids=["small", "deepseek"])
def test_attention_to_rows_in_c(sizes: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    """Oracle: softmax in float64, and PyTorch's error in the same type; in float32, the largest of some orders of sums.

    PyTorch's own order is the host's library's, and the C's follows the processor's vectors: both are like ``lanes``
    sums, each of every ``lanes``-th product in turn.  Decodes that share 288 tokens, a single one, and a chunk; more
    rows than a task has; a request's result is the same bit by bit alone.
    """
    (rank, rope), block_size = sizes, 16
    query_lens, seq_lens = np.array([1, 1, 1, 3], np.int32), np.array([310, 305, 40, 270], np.int32)
    tables = torch.randperm(80).view(4, 20).int()
    tables[1, :18] = tables[0, :18]
    kv = LayerKv(torch.randn(1, 80, block_size, 1, rank + rope).to(dtype))
    query, scale = torch.randn(6, heads, rank + rope).to(dtype), (rank + rope) ** -0.5
    shape = AttentionShape(num_heads=heads, num_kv_heads=1, head_dim=rank + rope, scale=scale, value_dim=rank)

    def run(backend: Any, own: slice, tokens: slice) -> torch.Tensor:
        lengths = query_lens[own]
        metadata = AttentionMetadata(
            num_decodes=int((lengths == 1).sum()),
            slot_mapping=torch.full((len(query[tokens]),), -1),
            block_table=tables[own],
            seq_lens=torch.from_numpy(seq_lens[own]),
            query_start=torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)),
            host_query_lens=lengths,
            host_seq_lens=seq_lens[own],
            is_padded=False,
        )
        backend.prepare(metadata)
        found: torch.Tensor = backend.forward(query[tokens], None, kv, metadata, shape)
        return found

    found, plain = run(NativeBackend(), slice(4), slice(6)), run(TorchBackend(), slice(4), slice(6))
    assert found.shape == (6, heads, rank)
    for index, tokens in enumerate((slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6))):
        rows = kv.cache[0, tables[index].long()].flatten(0, 1)[: seq_lens[index], 0]
        position = torch.arange(len(rows))
        hidden = position > position[len(rows) - len(query[tokens]) :, None]

        def attend(scores: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
            return torch.einsum("htn,nr->thr", weights, rows[:, :rank])

        def in_lanes(lanes: int, query: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            pairs = zip(query.split(lanes, -1), rows.split(lanes, -1), strict=True)
            sums = query.new_zeros(heads, len(query), len(rows), lanes)
            for q, row in pairs:
                sums[..., : row.shape[-1]] += q.transpose(0, 1)[:, :, None] * row
            return attend(functools.reduce(torch.add, sums.unbind(-1)), rows, hidden)

        wanted = attend(torch.einsum("thd,nd->htn", query[tokens].double(), rows.double()), rows.double(), hidden)
        twins = [plain[tokens]]
        if dtype == torch.float32:
            twins += [in_lanes(lanes, query[tokens], rows, hidden) for lanes in (1, 4, 16)]
        twin = max(twins, key=lambda result: error_of(result, wanted))
        assert_close_enough(found[tokens], twin, wanted, granted=wanted.abs().max().item())
        assert torch.equal(run(NativeBackend(), slice(index, index + 1), tokens), found[tokens])
