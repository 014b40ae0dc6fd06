"""``quantization_config`` of published checkpoints, and what is refused of it."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.model_config.test_families import PUBLISHED as MODELS
from tests.unit.model_config.test_model_config import llama
from tp_engine.errors import ConfigError
from tp_engine.model_config import load_model_config, read_model
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods import REFUSED, quant_methods, read_quantization
from tp_engine.model_config.quantization import QuantizationSpec, WeightScheme

LAYER = "model.layers.3"
Q, GATE, EXPERT = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts.7.up_proj"


def weights(bits: int = 4, kind: str = "int", strategy: str = "group", **changes: Any) -> dict[str, Any]:
    """Arguments as llm-compressor writes them."""
    return {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": kind, **changes,
    }  # fmt: skip


def compressed(form: str, own: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """One group of all linear layers."""
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": own}
    return {
        "config_groups": {"group_0": group}, "format": form, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed", **changes,
    }  # fmt: skip


BLOCK_FP8 = WeightScheme(
    packing="plain", kind="e4m3", group=128, row_block=128, activations="group", scale_name="weight_scale_inv"
)
TOKEN = weights(8, "float", "token", dynamic=True)
FP8_CACHE = weights(8, "float", "tensor")
W4A16 = compressed("pack-quantized", weights(group_size=128))
GPTQ: dict[str, Any] = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
AWQ: dict[str, Any] = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
AUTO_ROUND: dict[str, Any] = {
    "autoround_version": "0.5.1", "batch_size": 8, "bits": 4, "data_type": "int", "group_size": 128, "iters": 200,
    "low_gpu_mem_usage": True, "nsamples": 512, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round",
    "seqlen": 2048, "sym": True,
}  # fmt: skip
NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.3.self_attn*", "*.mlp.gate"],
    },
}  # fmt: skip
QUARK_FP8: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK_FP4: dict[str, Any] = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def quark(weight: dict[str, Any]) -> dict[str, Any]:
    """A block of Quark's, with the same numbers for all layers."""
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "bias": None}}


MXFP8 = WeightScheme(packing="mxfp8", kind="e4m3", group=32)
INT4 = WeightScheme(packing="pack-quantized", kind="int4", group=128)
GPTQ4 = WeightScheme(packing="gptq", kind="int4", group=128, scale_name="scales")
AWQ4 = WeightScheme(packing="awq", kind="int4", group=128, has_zeros=True, scale_name="scales")
FP8_TENSOR = WeightScheme(packing="plain", kind="e4m3", row_block=None, activations="tensor")
E2M1 = WeightScheme(packing="modelopt-nvfp4", kind="e2m1", group=16)

MIXED: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "FP8"}},
}  # fmt: skip

# A published configuration, and the schemes of an attention projection, a router and an expert.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[WeightScheme | None, WeightScheme | None, WeightScheme | None]]] = {
    "Qwen3-30B-A3B-FP8": (
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.3.input_layernorm", "model.layers.3.mlp.gate"],
        },
        (BLOCK_FP8, None, BLOCK_FP8),
    ),
    "DeepSeek-V3": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        (BLOCK_FP8, BLOCK_FP8, BLOCK_FP8),
    ),
    "MiniMax-M2": (
        {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
            "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        (BLOCK_FP8, None, BLOCK_FP8),
    ),
    "Meta-Llama-3-8B-Instruct-FP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        (FP8_TENSOR,) * 3,
    ),
    "Meta-Llama-3-8B-Instruct-FP8-KV": (
        {
            "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
        (FP8_TENSOR,) * 3,
    ),
    "Qwen3-8B-AWQ by GPTQModel": (
        {
            "bits": 4, "checkpoint_format": "gemm", "desc_act": True, "format": "gemm", "group_size": 128,
            "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.6.12"]}, "method": "awq", "pack_dtype": "int32",
            "quant_method": "awq", "sym": False, "version": "gemm", "zero_point": True,
        },
        (AWQ4,) * 3,
    ),
    "Qwen3-32B-FP8-dynamic": (
        compressed("float-quantized", weights(8, "float", "channel"), TOKEN),
        (WeightScheme(packing="plain", kind="e4m3", activations="token"),) * 3,
    ),
    "GLM-4.5-FP8": (
        compressed("float-quantized", weights(8, "float", "channel"), TOKEN, ignore=["lm_head", GATE]),
        (
            WeightScheme(packing="plain", kind="e4m3", activations="token"),
            None,
            WeightScheme(packing="plain", kind="e4m3", activations="token"),
        ),
    ),
    "Qwen3-8B-FP8-BLOCK": (
        compressed(
            "float-quantized",
            weights(8, "float", "block", block_structure=[128, 128]),
            weights(8, "float", "group", dynamic=True, group_size=128),
        ),
        (WeightScheme(packing="plain", kind="e4m3", group=128, row_block=128, activations="group"),) * 3,
    ),
    "Qwen3-32B-quantized.w4a16": (W4A16, (INT4,) * 3),
    "T-pro-it-2.0-AWQ": (
        compressed("pack-quantized", weights(group_size=128, symmetric=False)),
        (WeightScheme(packing="pack-quantized", kind="int4", group=128, has_zeros=True),) * 3,
    ),
    "Llama-3.1-8B-Instruct-quantized.w8a16": (
        compressed("pack-quantized", weights(8, strategy="channel")),
        (WeightScheme(packing="pack-quantized", kind="int8"),) * 3,
    ),
    "Qwen2.5-7B-quantized.w8a8": (
        compressed("int-quantized", weights(8, strategy="channel"), weights(8, "int", "token", dynamic=True)),
        (WeightScheme(packing="plain", kind="int8", activations="token"),) * 3,
    ),
    "Kimi-K2-Thinking": (
        compressed(
            "pack-quantized",
            weights(group_size=32),
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        ),
        (None, WeightScheme(packing="pack-quantized", kind="int4", group=32),
         WeightScheme(packing="pack-quantized", kind="int4", group=32)),
    ),
    "Qwen3-32B-NVFP4": (
        compressed(
            "nvfp4-pack-quantized",
            weights(4, "float", "tensor_group", group_size=16),
            weights(4, "float", "tensor_group", group_size=16, dynamic="local"),
            ignore=["lm_head", "re:.*mlp.gate$"],
        ),
        (WeightScheme(packing="nvfp4", kind="e2m1", group=16), None,
         WeightScheme(packing="nvfp4", kind="e2m1", group=16)),
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8")),
        (WeightScheme(packing="mxfp4-packed", kind="e2m1", group=32),) * 3,
    ),
    "nvidia/Qwen3-30B-A3B-NVFP4": (
        {
            "config_groups": {"group_0": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"],
            }},
            "ignore": ["lm_head", "model.layers.3.self_attn*", "*.mlp.gate"], "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.37.0"}, "quant_method": "modelopt",
        },
        (None, None, E2M1),
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        {
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": [Q]},
                "group_1": {"weights": {"num_bits": 4, "type": "float"}, "targets": [f"{LAYER}.mlp.experts"]},
            },
            "quantized_layers": {
                Q: {"quant_algo": "FP8"}, f"{LAYER}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128},
            },
            "ignore": ["mtp.layers.0*", "mtp*"], "quant_algo": "MIXED_PRECISION",
            "producer": {"name": "modelopt", "version": "0.37.0"}, "quant_method": "modelopt",
        },
        (FP8_TENSOR, None, E2M1),
    ),
    "Qwen3-32B-FP8-Static-PerTensor": (
        {
            "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
            "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
        },
        (FP8_TENSOR,) * 3,
    ),
    "a file without the names of its method and its maker": (
        {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", GATE]},
        (E2M1, None, E2M1),
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
        (FP8_TENSOR,) * 3,
    ),
    "Qwen3-32B-AWQ": (AWQ, (AWQ4,) * 3),
    "Qwen3-30B-A3B-AWQ": ({**AWQ, "modules_to_not_convert": ["gate"]}, (AWQ4, None, AWQ4)),
    "Qwen2.5-72B-Instruct-GPTQ-Int4": (GPTQ, (GPTQ4,) * 3),
    "Qwen2.5-7B-Instruct-GPTQ-Int8": (
        {**GPTQ, "bits": 8},
        (WeightScheme(packing="gptq", kind="int8", group=128, scale_name="scales"),) * 3,
    ),
    "GPTQ of version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False, "group_size": -1},
        (WeightScheme(packing="gptq_v2", kind="int4", has_zeros=True, scale_name="scales"),) * 3,
    ),
    "GPTQ with rules": (
        {**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}, r"+:.*experts.*": {"bits": 8, "group_size": 64}}},
        (GPTQ4, None, WeightScheme(packing="gptq", kind="int8", group=64, scale_name="scales")),
    ),
    "GPTQ of named modules": (
        {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]},
        (GPTQ4, None, None),
    ),
    "Intel/Qwen3.5-122B-A10B-int4-AutoRound": (
        {
            **AUTO_ROUND, "block_name_to_quantize": ["model.language_model.layers", "model.layers"],
            "extra_config": {f"{LAYER}.self_attn.q_proj": {"bits": 8}, r".*mlp\.gate": {"bits": 16}},
        },
        (WeightScheme(packing="gptq", kind="int8", group=128, scale_name="scales"), None, GPTQ4),
    ),
    "AutoRound as AWQ": (
        {
            **AUTO_ROUND, "quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq",
            "block_name_to_quantize": "model.layers.3, model.x",
        },
        (AWQ4,) * 3,
    ),
    "MXFP8 by SGLang's names": (
        {
            "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "mxfp8", "scale_fmt": "ue8m0",
            "weight_block_size": [1, 32], "modules_to_not_convert": ["gate"],
        },
        (MXFP8, None, MXFP8),
    ),
    "amd/Llama-3.1-70B-Instruct-FP8-KV": (
        {
            **quark({**QUARK_FP8, "observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even"}),
            "exclude": ["lm_head"], "layer_type_quant_config": {}, "quant_mode": "eager_mode", "version": "0.8",
        },
        (WeightScheme(packing="plain", kind="e4m3", row_block=None),) * 3,
    ),
    "gpt-oss-20b": (
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
        (None, None, WeightScheme(packing="mxfp4", kind="e2m1", group=32, scale_name="scales")),
    ),
}  # fmt: skip


def read(values: dict[str, Any]) -> QuantizationSpec:
    """What a model with this ``quantization_config`` has."""
    found = read_model(llama(quantization_config=values)).quantization
    assert found is not None
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    """Oracle: the checkpoints' tensors, as their publishers describe them; the output head is never quantised."""
    values, expected = PUBLISHED[name]
    spec = read(values)
    assert tuple(spec.scheme_of(module) for module in (Q, GATE, EXPERT)) == expected
    assert spec.scheme_of("lm_head") is None
    assert hash(spec) == hash(read(values)) and pickle.loads(pickle.dumps(spec)) == spec


def test_every_method_is_covered() -> None:
    """Oracle: the table of readers."""
    named = {values.get("quant_method", "modelopt").removeprefix("intel/") for values, _ in PUBLISHED.values()}
    assert named | {"modelopt_fp4", "modelopt_mxfp8"} == quant_methods().keys()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        *(({"quant_method": name}, name) for name in ("bitsandbytes", "gguf", "hqq", "exl2", "w4afp8")),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "auto_gptq and auto_awq"),
        ({**AUTO_ROUND, "packing_format": "auto_awq", "bits": 8}, "bits is 8"),
        ({**AUTO_ROUND, "bits": 2}, "bits is 2"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits"),
        ({**AUTO_ROUND, "rotation": "hadamard"}, "rotation"),
        ({**AUTO_ROUND, "extra_config": {GATE: {"bits": 4, "rotation": "hadamard"}}}, "rotation"),
        ({**AUTO_ROUND, "block_name_to_quantize": 3}, "block_name_to_quantize"),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "scale_fmt": "ue5m3"}, "ue5m3"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "blocks need"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "surprise": 1}, "surprise=1"),
        ({**AWQ, "version": "gemv"}, "gemm"),
        ({**AWQ, "checkpoint_format": "gemv"}, "gemm"),
        ({**AWQ, "bits": 3}, "bits is 3"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "modules_to_not_convert": [1]}, "list of names"),
        ({**GPTQ, "bits": 3}, "bits is 3"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "dynamic": {"+:.*": {"desc_act": 1}}}, "desc_act"),
        ({**GPTQ, "dynamic": {"+:.*": {"rotation": "hadamard"}}}, "rotation"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation"),
        ({**GPTQ, "modules_in_block_to_quantize": [1]}, "modules_in_block_to_quantize"),
        ({"quant_method": "mxfp4", "dequantize": True}, "dequantize"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "blocks of 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "pre_quant_scale": True}, "pre_quant_scale"),
        ({**MIXED, "quantized_layers": {Q: {"quant_algo": "W4A16_AWQ"}}}, "W4A16_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "pre_quant_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64}, "blocks of 128"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16}, "blocks of 32"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, r"MXFP8 has \[1, 32\]"),
        ({"quant_method": "mxfp8", "scale_fmt": "float"}, "scale_fmt"),
        ({"quant_method": "mxfp8", "surprise": 1}, "surprise"),
        ({"quant_method": "fp8", "store_dtype": "int8"}, "store_dtype"),
        (quark({**QUARK_FP8, "dtype": "int4"}), "int4 per_tensor"),
        (quark({**QUARK_FP8, "qscheme": "per_group", "group_size": 128}), "groups of 128"),
        (quark({**QUARK_FP8, "is_dynamic": True}), "stored scales"),
        (quark({**QUARK_FP8, "surprise": 1}), "surprise"),
        ({**quark(QUARK_FP8), "layer_type_quant_config": {"Embedding": {"weight": QUARK_FP8}}}, "Embedding"),
        ({**quark(QUARK_FP8), "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "int8"}}}}, "int8"),
        ({**MIXED, "quantized_layers": {Q: {"quant_algo": "NVFP4", "group_size": 32}}}, "blocks of 16"),
        ({**MIXED, "quantized_layers": {Q: {}}}, "quant_algo"),
        ({**MIXED, "config_groups": {"group_0": {"targets": [GATE]}}}, "quantized_layers"),
        ({"quant_algo": "FP8", "producer": {"name": "another"}}, "quant_method"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": {"targets": ["re:.*"]}}},
            "targets",
        ),
        (compressed("marlin-24", weights(group_size=128)), "marlin-24"),
        (compressed("mixed-precision", weights(group_size=128)), "format"),
        (compressed("pack-quantized", weights(3, group_size=128)), "int of 3 bits"),
        (compressed("pack-quantized", weights(strategy="tensor")), "strategy is 'tensor'"),
        (compressed("pack-quantized", weights(group_size=0)), "group_size"),
        (compressed("pack-quantized", weights(group_size=128, actorder="input")), "actorder is 'input'"),
        (
            compressed("nvfp4-pack-quantized", weights(4, "float", "tensor_group", group_size=16, actorder="group")),
            "actorder is 'group'",
        ),
        (compressed("pack-quantized", weights(group_size=128, surprise=1)), "surprise"),
        (compressed("nvfp4-pack-quantized", weights(4, "float", "tensor_group", group_size=32)), "it must be 16"),
        (compressed("int-quantized", weights(8, strategy="channel", symmetric=False)), "zero points"),
        (compressed("float-quantized", weights(8, "float", "block")), "block_structure"),
        (
            compressed("int-quantized", weights(8, strategy="channel"), {**TOKEN, "type": "int", "symmetric": False}),
            "symmetric",
        ),
        (compressed("int-quantized", weights(8, strategy="channel"), TOKEN), "float of 8 bits"),
        (compressed("float-quantized", weights(8, "float", "channel"), {**TOKEN, "dynamic": False}), "strategy"),
        ({**W4A16, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**W4A16, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({**W4A16, "kv_cache_scheme": weights(8, "int", "tensor")}, "kv_cache_scheme"),
        ({**W4A16, "config_groups": {}}, "config_groups"),
        ({**W4A16, "config_groups": {"g": {"targets": ["Linear"], "weights": None}}}, "weights"),
        ({**W4A16, "config_groups": {"g": {"targets": ["Embedding"], "weights": weights(group_size=8)}}}, "Embedding"),
        (
            {**W4A16, "config_groups": {"g": {"targets": ["Linear"], "weights": {}, "output_activations": TOKEN}}},
            "output_activations",
        ),
    ],
)
def test_refusals_name_the_value(values: dict[str, Any], named: str) -> None:
    """Oracle: the rule that no key is ignored."""
    with pytest.raises(ConfigError, match=f"quantization_config.*{named}"):
        read(values)


def test_the_document_lists_the_methods() -> None:
    """Oracle: the readers and the refusals."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    section = text.partition("\n## Quantised checkpoints\n")[2].partition("\n## ")[0]
    table, _, prose = section.partition("Refused by name:")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} - {"quant_method"}
    assert named == quant_methods().keys()
    assert set(re.findall(r"`([\w-]+)`", prose.partition(". ")[0])) == REFUSED.keys()


def test_refused_methods_have_no_reader() -> None:
    """Oracle: the rule that a method is served or refused; unknown ones are refused, too."""
    assert not REFUSED.keys() & quant_methods().keys()
    with pytest.raises(ConfigError, match=r"'other'.*serves auto-round, awq, compressed-tensors, fp8"):
        read({"quant_method": "other"})


@pytest.mark.parametrize("values", [{"quant_method": "exl3", "bits": 3.0}, {"bits": 4, "group_size": 64}])
def test_refusals_say_which_upload_to_take(values: dict[str, Any]) -> None:
    """Oracle: by hand: ExLlama's and MLX's files; names of uploads that are read, in one line."""
    with pytest.raises(ConfigError, match=r"(ExLlama|MLX)'s.*take another upload.*FP8, AWQ, GPTQ-Int4") as caught:
        read(values)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_columns_by_their_activations() -> None:
    """Oracle: the tensor that has the group of each column; whole rows are one group."""
    assert read({**GPTQ, "desc_act": True}).scheme_of(Q) == replace(GPTQ4, order_name="g_idx")
    assert read({**GPTQ, "desc_act": True, "group_size": -1}).scheme_of(Q) == replace(GPTQ4, group=None)
    assert read({**GPTQ, "dynamic": {"+:.*q_proj": {"desc_act": True}}}).scheme_of(GATE) == GPTQ4
    ordered = read(compressed("pack-quantized", weights(group_size=128, actorder="group"))).scheme_of(Q)
    assert ordered == replace(INT4, order_name="weight_g_idx")


def test_quark_by_layer() -> None:
    """Oracle: Quark's rules: excluded names, then named layers, then types, then all; scales of a cache are known."""
    spec = read(
        {
            **quark(QUARK_FP4),
            "exclude": ["lm_head", "re:.*o_proj"],
            "layer_quant_config": {"*k_proj": {"weight": {**QUARK_FP8, "qscheme": "per_channel", "ch_axis": 0}}},
            "kv_cache_quant_config": {"*k_proj": {"output_tensors": QUARK_FP8}},
        }
    )
    layer = "model.layers.0.self_attn"
    assert spec.scheme_of("lm_head") is spec.scheme_of(f"{layer}.o_proj") is None and spec.has_kv_scales
    assert spec.scheme_of(f"{layer}.k_proj") == WeightScheme(packing="plain", kind="e4m3")
    assert spec.scheme_of(Q) == WeightScheme(packing="mxfp4-weight", kind="e2m1", group=32)


def test_formats_of_groups() -> None:
    """Oracle: llm-compressor's rules: ignored names, then named targets, then the class; each group has its format."""
    four = {"targets": ["re:.*experts.*"], "weights": weights(group_size=32), "format": "pack-quantized"}
    eight = {"targets": ["Linear"], "weights": weights(8, "float", "channel"), "input_activations": TOKEN}
    for usual in ("float-quantized", "mixed-precision"):
        own = {**eight, "format": "float-quantized"} if usual == "mixed-precision" else eight
        spec = read({**W4A16, "format": usual, "config_groups": {"b": own, "a": four}})
        assert spec.scheme_of(EXPERT) == WeightScheme(packing="pack-quantized", kind="int4", group=32)
        assert spec.scheme_of(Q) == WeightScheme(packing="plain", kind="e4m3", activations="token")


def test_scales_of_a_kv_cache() -> None:
    """Oracle: the three places of config.json; dynamic scales are not stored."""
    static, dynamic = FP8_CACHE, {**FP8_CACHE, "dynamic": True}
    assert [read({**W4A16, "kv_cache_scheme": one}).has_kv_scales for one in (None, static, dynamic)] == [0, 1, 0]
    assert "k_scale" in read(W4A16).skipped
    assert read(PUBLISHED["nvidia/Qwen3-30B-A3B-NVFP4"][0]).has_kv_scales
    assert not read(PUBLISHED["nvidia/Llama-3.1-8B-Instruct-FP8"][0]).has_kv_scales


def test_unread_zero_points() -> None:
    """Oracle: symmetric GPTQ has zeros of one value."""
    assert "qzeros" in read(GPTQ).skipped and "qzeros" not in read({**GPTQ, "sym": False}).skipped
    assert "weight_zero_point" in read(W4A16).skipped
    assert "weight_zero_point" not in read(PUBLISHED["T-pro-it-2.0-AWQ"][0]).skipped


def test_modules_that_tensors_tell() -> None:
    """Oracle: AutoAWQ and gptqmodel, which leave some modules out without a word, or name a part of a segment."""
    assert read(AWQ).is_found_by_tensors and read(GPTQ).is_found_by_tensors
    assert not any(read(values).is_found_by_tensors for values in (W4A16, PUBLISHED["DeepSeek-V3"][0]))
    spec = read({**AWQ, "modules_to_not_convert": ["shared_expert"]})
    names = {"model.layers.0.mlp.shared_experts.up_proj.weight", f"{Q}.qweight"}
    assert spec.found_among(names).scheme_of("model.layers.0.mlp.shared_experts.up_proj") is None
    assert spec.found_among(names).scheme_of(Q) == AWQ4


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("lm_head", "language_model.lm_head", "lm_header"),
        ("model.layers.1", "model.layers.1.mlp.gate", "model.layers.10.mlp.gate"),
        ("model.layers.1.", "model.layers.1.mlp.gate", "model.layers.10.mlp.gate"),
        ("mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        ("model.layers.*.self_attn", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attention.q_proj"),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"),
        ("re:.*gate$", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        ("re:model.visual", "model.visual.blocks", "own.model.visual"),
        ("*", "anything", None),
    ],
)
def test_matching_of_names(pattern: str, matching: str, other: str | None) -> None:
    """Oracle: the rules of the publishers' own tools."""
    scheme = WeightScheme(packing="plain", kind="int8")
    spec = QuantizationSpec(method="test", rules=((pattern, scheme),))
    assert spec.scheme_of("x.y", matching) == scheme and spec.scheme_of(matching) == scheme
    assert other is None or spec.scheme_of(other) is None


def test_the_first_rule_holds() -> None:
    """Oracle: the order of the rules, whatever their kind."""
    one, two = (WeightScheme(packing="plain", kind="int8", group=group) for group in (16, 32))
    spec = QuantizationSpec(method="test", rules=(("a.b", None), ("re:a", one), ("c", two), ("*", None)))
    assert [spec.scheme_of(name) for name in ("a.b.c", "a.c", "b.c", "d")] == [None, one, two, None]


def test_parts_of_one_product_are_alike() -> None:
    """Oracle: the rule that a fused module is ignored only if all its parts are."""
    model = read_model(llama(quantization_config={**W4A16, "ignore": ["lm_head", "model.layers.1.self_attn.q_proj"]}))
    assert model.scheme_of(*(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")) == INT4
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj unquantised and .*k_proj as int4 in groups"):
        model.scheme_of(*(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"))
    assert read_model(llama()).scheme_of("model.layers.0.self_attn.q_proj") is None


def test_names_of_a_text_part() -> None:
    """Oracle: Gemma 3's spellings; the list names the modules as they are on disk."""
    ignored = ["lm_head", "re:.*vision_tower.*", "model.language_model.layers.0.mlp.down_proj"]
    spec = read_model({**MODELS["gemma-3-4b"], "quantization_config": {**W4A16, "ignore": ignored}})
    assert spec.scheme_of("model.layers.0.mlp.down_proj") is None
    assert spec.scheme_of("model.layers.1.mlp.down_proj") == INT4


def test_a_quantisation_inside_of_the_text_part() -> None:
    """Oracle: Kimi K2.5, whose text_config holds the key."""
    model = MODELS["gemma-3-4b"]
    spec = read_model({**model, "text_config": {**model["text_config"], "quantization_config": W4A16}})
    assert spec.scheme_of("model.layers.1.mlp.down_proj") == INT4


def test_the_file_beside_config_json(tmp_path: Path) -> None:
    """Oracle: NVIDIA's files; config.json is asked first."""
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    spec = load_model_config(str(tmp_path))[0].quantization
    assert spec is not None and spec.method == "modelopt NVFP4" and spec.has_kv_scales
    assert [spec.scheme_of(name) for name in (Q, GATE, EXPERT, "lm_head")] == [None, None, E2M1, None]
    (tmp_path / "config.json").write_text(json.dumps(llama(quantization_config=AWQ)))
    found = load_model_config(str(tmp_path))[0].quantization
    assert found is not None and found.method == "awq"


@pytest.mark.parametrize(
    ("name", "written", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_older_files_beside_config_json(name: str, written: dict[str, Any], method: str, tmp_path: Path) -> None:
    """Oracle: AutoGPTQ's and AutoAWQ's files, which count if the tensors are quantised, or are not there."""
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / name).write_text(json.dumps(written))
    for tensor in (None, f"{Q}.qweight", f"{Q}.weight"):
        if tensor is not None:
            save_file({tensor: torch.zeros(1)}, tmp_path / "model.safetensors")
        found = load_model_config(str(tmp_path))[0].quantization
        assert (None if found is None else found.method) == (None if tensor == f"{Q}.weight" else method), tensor


def test_no_quantisation() -> None:
    """Oracle: the absent key; the old name of compressed-tensors' key."""
    assert read_quantization(ConfigJson({"quantization_config": {}})) is None
    old = read_quantization(ConfigJson({"compression_config": W4A16}))
    assert old is not None and old.scheme_of(Q) == INT4
