"""Bytes of weights by format, without a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.apps.advice.test_recommend import QWEN3_30B
from tests.unit.model_config.test_model_config import llama
from tests.unit.model_config.test_quantization_config import AWQ, BLOCK_FP8, PUBLISHED, W4A16
from tests.unit.models.test_shard import Somewhere
from tp_engine import recommend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.layers.quantization.online import quantise_e4m3, quantise_int4, quantise_int8
from tp_engine.model_config import check_quantization_options, check_tensor_parallel, read_model
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.weight_sizes import local_parameters, local_weight_bytes
from tp_engine.worker.effective_config import resolve

DENSE = llama(num_hidden_layers=2, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, head_dim=128)
DENSE |= {"num_key_value_heads": 4, "torch_dtype": "bfloat16"}
SMALL = {**DENSE, "num_hidden_layers": 1, "intermediate_size": 2432}
EXPERTS = {**QWEN3_30B, "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 704, "num_experts": 8}


def spec_of(config: dict[str, Any], quantization: dict[str, Any] | None) -> ModelSpec:
    return read_model({**config, "quantization_config": quantization})


def parameters(spec: ModelSpec, world_size: int) -> dict[str, torch.Tensor]:
    """The parameters of the first rank, without memory."""
    model = build_model(
        spec,
        communicator=Somewhere(0, world_size),  # type: ignore[arg-type]
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(spec.kv_layout.groups),
        max_model_len=16,
    )
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("GPTQ ")])
def test_quantised_checkpoints(name: str) -> None:
    """Oracle: the parameters that the layers make, for each number of ranks; 148 groups of 128 do not divide by 8, nor
    22 blocks of 32.  GPTQ's layers keep zero points for symmetric weights, too: 0.6 %."""
    for config in (EXPERTS,) if name == "gpt-oss-20b" else (DENSE, EXPERTS):
        for world_size in (1, 2, 4):
            spec = spec_of(config, PUBLISHED[name][0])
            expected = sum(one.nbytes for one in parameters(spec, world_size).values())
            assert local_weight_bytes(spec, world_size, dtype="bfloat16") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["w4a16", "modelopt NVFP4"])
def test_quantised_heads(name: str) -> None:
    """Oracle: the parameters that the layers make; a tied head has none."""
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    quantization = nvfp4 if name == "modelopt NVFP4" else {**W4A16, "ignore": []}
    for tied in (False, True):
        for world_size in (1, 2):
            spec = spec_of({**DENSE, "tie_word_embeddings": tied}, quantization)
            found = parameters(spec, world_size)
            assert ("lm_head.codes" in found) is not tied
            expected = sum(one.nbytes for one in found.values())
            assert local_weight_bytes(spec, world_size, dtype="bfloat16") == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_online_formats(config: dict[str, Any], name: str) -> None:
    """Oracle: what the formats make of the parameters; int8 leaves experts and has two orders, int4 takes the head."""
    quantise = {"int8": quantise_int8, "fp8": quantise_e4m3, "int4": quantise_int4}[name]
    orders = 2 if name == "int8" else 1
    for world_size in (1, 4):
        spec, expected = spec_of(config, None), 0
        for path, one in parameters(spec, world_size).items():
            is_linear = "_proj." in path or (name != "int8" and path.endswith((".gate_up", ".down")))
            if name == "int4" and path.startswith("lm_head."):
                expected += quantise_int8(one).num_bytes
            else:
                expected += orders * quantise(one).num_bytes if is_linear else one.nbytes
        assert local_weight_bytes(spec, world_size, dtype="bfloat16", quantization=name) == expected


def test_the_model_s_own_type() -> None:
    """Oracle: the number of parameters."""
    spec = spec_of(EXPERTS, None)
    for active in (False, True):
        number = local_parameters(spec, 2, active_only=active)
        assert local_weight_bytes(spec, 2, dtype="float32", active_only=active) == 4 * number


def test_ignored_modules_keep_their_type() -> None:
    """Oracle: by hand, one of two layers; 4.125 bits instead of 16."""
    every, half = (spec_of(DENSE, {**W4A16, "ignore": ["lm_head", *ignored]}) for ignored in ((), ("model.layers.1",)))
    linear = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944
    saved = local_weight_bytes(half, 1, dtype="bfloat16") - local_weight_bytes(every, 1, dtype="bfloat16")
    assert saved == linear * (16 - 4.125) / 8


def test_numbers_of_ranks_are_those_of_the_plain_model() -> None:
    """Oracle: the rule; 18944 / 128 is 148, which 8 does not divide."""
    config = {**DENSE, "num_attention_heads": 32, "num_key_value_heads": 8}
    for quantization in (None, W4A16, PUBLISHED["DeepSeek-V3"][0]):
        check_tensor_parallel(spec_of(config, quantization), 8)
        with pytest.raises(ConfigError, match="Legal sizes for this LlamaForCausalLM: 1, 2, 4, 8, 16, 32"):
            check_tensor_parallel(spec_of(config, quantization), 3)


def test_recommendations_name_the_format() -> None:
    """Oracle: the checkpoint's own format is taken; an online one is in the command."""
    config = llama(num_hidden_layers=32, torch_dtype="bfloat16")
    plain = recommend(spec_of(config, None), gpu="rtx4090")
    own = recommend(spec_of(config, AWQ), gpu="rtx4090")
    online = recommend(spec_of(config, None), gpu="rtx4090", quantization="int4")
    assert plain.weight_format == "bfloat16" and plain.quantization is None
    assert own.weight_format == "awq" and "--quantization" not in (own.command or "")
    assert "weights (awq)" in own.explain() and "weights: awq, as the checkpoint has them" in own.explain()
    assert "--quantization int4" in (online.command or "") and "quantization int4:" in online.explain()
    assert own.weight_bytes < plain.weight_bytes / 2 and online.weight_bytes < own.weight_bytes
    with pytest.raises(ConfigError, match="quantised already"):
        recommend(spec_of(config, AWQ), gpu="rtx4090", quantization="fp8")


@pytest.mark.parametrize(("memory", "expected"), [("14GiB", "fp8"), ("11GiB", "int4")])
def test_a_quantised_variant_is_a_remedy(memory: str, expected: str) -> None:
    """Oracle: 8 billion parameters of 16 bits are 15 GiB; the most exact format that fits is named."""
    config = llama(num_hidden_layers=32, torch_dtype="bfloat16")
    refused = recommend(spec_of(config, None), device_memory=memory, tensor_parallel_size=1)
    assert not refused.fits
    assert f"quantization {expected}, or a checkpoint that is quantised to as many bits" in refused.remedies
    assert recommend(spec_of(config, None), device_memory=memory, quantization=expected, tensor_parallel_size=1).fits


def test_options_that_contradict_the_checkpoint() -> None:
    """Oracle: scales of a KV cache are used or refused; weights are quantised once."""
    scales = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}}
    spec = spec_of(DENSE, {**W4A16, **scales})
    for kv_cache_dtype in ("auto", "bfloat16", "int8"):
        check_quantization_options(spec, None, kv_cache_dtype)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8.*Set kv_cache_dtype to int8 or auto"):
        check_quantization_options(spec, None, "fp8")
    check_quantization_options(spec_of(DENSE, W4A16), None, "fp8")
    with pytest.raises(ConfigError, match=r"int4, but .* already \(compressed-tensors\); leave"):
        check_quantization_options(spec, "int4", "auto")
    check_quantization_options(spec_of(DENSE, None), "int4", "fp8")


def test_the_engine_refuses_them(tmp_path: Path) -> None:
    """Oracle: the same rules, before a device is touched."""
    scales = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "quantization_config": {**W4A16, **scales}}))
    options: dict[str, Any] = {"model": str(tmp_path), "device": "cpu"}
    assert resolve(EngineConfig(**options, kv_cache_dtype="int8")).model.quantization is not None
    with pytest.raises(ConfigError, match="scales for an fp8 KV cache"):
        resolve(EngineConfig(**options, kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="quantised already"):
        resolve(EngineConfig(**options, quantization="int4"))


def test_blocks_of_experts() -> None:
    """Oracle: only gpt-oss's blocks stay whole."""
    assert BLOCK_FP8.experts_block == 1
    scheme = spec_of(EXPERTS, PUBLISHED["gpt-oss-20b"][0]).scheme_of("model.layers.0.mlp.experts")
    assert scheme is not None and scheme.experts_block == 32


def gemma_e(**sizes: Any) -> dict[str, Any]:
    """The text part of Gemma 4 E2B or E4B."""
    shared = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "global_head_dim": 512, "sliding_window": 512}
    shared |= {"num_attention_heads": 8, "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072}
    return {"architectures": ["Gemma4ForCausalLM"], **shared, **sizes}


E2B = gemma_e(
    hidden_size=1536, num_hidden_layers=35, intermediate_size=6144, num_key_value_heads=1, num_kv_shared_layers=20,
    use_double_wide_mlp=True, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
)  # fmt: skip
E4B = gemma_e(
    hidden_size=2560, num_hidden_layers=42, intermediate_size=10240, num_key_value_heads=2, num_kv_shared_layers=18
)
HYPERCLOVA = {
    "architectures": ["HyperCLOVAXForCausalLM"], "hidden_size": 6144, "intermediate_size": 14336,
    "num_hidden_layers": 38, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 110592, "max_position_embeddings": 131072,
}  # fmt: skip
SOLAR_OPEN = {
    "architectures": ["SolarOpenForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 196608, "max_position_embeddings": 131072, "moe_intermediate_size": 1280,
    "n_routed_experts": 128, "n_shared_experts": 1, "intermediate_size": 10240, "use_qk_norm": False,
}  # fmt: skip
HY3 = {
    "architectures": ["HYV3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 120832, "max_position_embeddings": 262144,
    "moe_intermediate_size": 1536, "expert_hidden_dim": 1536, "num_experts": 192, "qk_norm": True, "route_norm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "active", "num_cached"),
    [
        (E2B, 4.6, 2.3, 15),
        (E4B, 7.5, 4.6, 24),
        (HYPERCLOVA, 14.75, 14.75, 38),
        (SOLAR_OPEN, 102.6, 12, 48),
        (HY3, 295, 21, 80),
    ],
    ids=["E2B", "E4B", "HyperCLOVA X", "Solar Open", "Hy3"],
)
def test_parameters_of_published_models(
    config: dict[str, Any], billions: float, active: float, num_cached: int
) -> None:
    """Oracle: the publishers' numbers; Gemma's without what sees and hears, the active ones without the table of each
    layer's embeddings.  Layers that read the keys and values of others have no room in the cache."""
    spec = read_model(config)
    assert local_parameters(spec, 1) / 1e9 == pytest.approx(billions, rel=0.01)
    assert local_parameters(spec, 1, active_only=True) / 1e9 == pytest.approx(active, rel=0.03)
    assert spec.kv_layout.layers == tuple(range(num_cached))
