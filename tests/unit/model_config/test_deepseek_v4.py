"""DeepSeek V4's config.json, by the values of the released models."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.apps.advice.sizes import block_bytes, state_bytes
from tp_engine.errors import ConfigError
from tp_engine.model_config import check_tensor_parallel, read_model
from tp_engine.model_config.spec import ModelSpec

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "head_dim": 512,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last one is the draft head's
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-06,
    "hc_sinkhorn_iters": 20,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def read(**changes: Any) -> ModelSpec:
    return read_model({**FLASH, **changes})


def test_kv_bytes_are_those_of_a_formula() -> None:
    """Oracle: by hand.  A block of 128 tokens has, of 4 to 5 layers with a window, 128 rows of 512; of 10 or 11 of the
    layers at 1/4, 32 rows of 512 and of 128; and of all 20 at 1/128, one row; each rank has all of it."""
    model = read()
    for world_size in (1, 8):
        layout = model.kv_layout_on(world_size)
        found = [(len(group.layers), group.rate, group.window, len(group.index_layers)) for group in layout.groups]
        assert [one for one in found if one[1] > 1] == [(10, 4, None, 10), (11, 4, None, 11), (20, 128, None, 0)]
        assert sum(count for count, rate, *_ in found if rate == 1) == 43
        assert {one[2] for one in found if one[1] == 1} == {128}
        assert block_bytes(model, world_size, 128, "bfloat16") == 128 * 5 * 512 * 2
        sums = 20 * 1 * 3 * 512 + 21 * 3 * 3 * (512 + 128)
        assert state_bytes(model, world_size, 16) == (16 + 8 + 1) * sums * 4
        assert layout.largest_rate == 128


def test_layers_and_routers_are_as_listed() -> None:
    """Oracle: the file; layers that compress turn by YaRN around another base, without its factor of the scores."""
    model = read()
    rates = [None if layer.compression is None else layer.compression.rate for layer in model.layers]
    assert rates == [None, None, *[4, 128] * 20, 4]
    assert [layer.experts is not None and layer.experts.by_id is not None for layer in model.layers[:5]] == [
        True, True, True, False, False,
    ]  # fmt: skip
    main, compress = model.ropes
    assert (main.theta, main.kind, main.rotary_dim) == (1e4, "default", 64)
    assert (compress.theta, compress.kind, compress.attention_factor) == (1.6e5, "yarn", 1.0)
    named = {f"compress_rate_{name}": rate for name, rate in (("csa", 8), ("hca", 64))}
    changed = read(**named)
    assert {layer.compression.rate for layer in changed.layers if layer.compression is not None} == {8, 64}


def test_experts_have_4_bits_and_what_compresses_is_plain() -> None:
    """Oracle: the released files' tensors, by the vendor's names."""
    model = read()
    found = [
        model.scheme_of(f"model.layers.3.{name}")
        for name in (
            "mlp.experts.0.w1",
            "mlp.shared_experts.up_proj",
            "self_attn.q_a_proj",
            "self_attn.compressor.kv_proj",
            "self_attn.compressor.indexer.gate_proj",
            "self_attn.compressor.indexer.q_b_proj",
        )
    ]
    fp8 = ("plain", "scale")
    stored = [None if one is None else (one.packing, one.scale_name) for one in found]
    assert stored == [("mxfp4-int8", "scale"), fp8, fp8, None, None, fp8]
    names = model.names
    assert names.spelled("model.embed_tokens.weight", names.spellings[0]) == "embed.weight"
    assert names.spelled("model.hc_head.hc_fn", names.spellings[0]) == "hc_head_fn"
    own = "model.layers.2.self_attn.compressor.indexer.kv_proj.weight"
    assert names.spelled(own, names.spellings[0]) == "layers.2.attn.indexer.compressor.wkv.weight"
    assert (
        names.spelled("model.layers.2.mlp.experts.7.w2.weight", names.spellings[1])
        == "model.layers.2.ffn.experts.7.w2.weight"
    )


def test_legal_numbers_of_ranks_divide_the_groups() -> None:
    """Oracle: 8 groups of heads, 256 experts' inner size and 2048 of the shared one."""
    model = read()
    for world_size in (1, 2, 4, 8):
        check_tensor_parallel(model, world_size)
    with pytest.raises(ConfigError, match=r"8 groups of attention heads cannot be divided equally.*: 1, 2, 4, 8"):
        check_tensor_parallel(model, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0] * 42}, "compress_ratios is .* for each of the 43 layers"),
        ({"compress_ratios": [16] * 43}, "must have one of 0, 4, 128"),
        (
            {"layer_types": ["full_attention"] * 43, "compress_ratios": None},
            "layer_types is .* must have one of sliding",
        ),
        ({"compress_rates": {"compressed_sparse_attention": 3}}, "a rate must be a power of two"),
        ({"mlp_layer_types": ["dense"] * 43}, "must say hash_moe or moe for each of the 43 layers"),
        ({"o_groups": 7}, "it must divide the 64 attention heads"),
        ({"index_head_dim": 32}, "qk_rope_head_dim, 64, of its elements turn"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"expert_dtype": "int3"}, "expert_dtype"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "quant_method is 'modelopt NVFP4'; of this model only fp8 is read, .*: take its maker's own upload",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """Oracle: the rule in the message."""
    with pytest.raises(ConfigError, match=message):
        read(**changes)
