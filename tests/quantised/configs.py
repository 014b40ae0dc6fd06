"""``quantization_config`` as each format's makers write it, and the modules that it names as not quantised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_OPTIONS_OF_TRANSFORMERS: Json = {
    "batch_size": 1,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "dataset": None,
    "exllama_config": {"version": 1},
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "tokenizer": None,
    "use_cuda_fp16": False,
    "use_exllama": True,
}


@dataclass(frozen=True)
class Kept:
    """What stays as it is.

    ``modules`` are the names of all linear modules that are not quantised; ``layers`` are the layers of which none is.
    With ``patterns``, the configuration names them by patterns where the format has any.
    """

    modules: Sequence[str]
    layers: Sequence[int] = ()
    patterns: bool = False

    @property
    def prefixes(self) -> list[str]:
        """Names of modules, or of what they are in."""
        return [f"model.layers.{layer}" for layer in self.layers] + self._outside(self.modules)

    @property
    def expressions(self) -> list[str]:
        """Regular expressions of whole names."""
        parts = {name.split(".", 3)[3] for name in self._outside(self.modules[1:])}
        gates = [f".*{re.escape(part)}$" for part in sorted(parts)]
        return [*gates, *(rf"model\.layers\.{layer}\..*" for layer in self.layers)]

    def _outside(self, names: Sequence[str]) -> list[str]:
        inside = tuple(f"model.layers.{layer}." for layer in self.layers)
        return [name for name in names if not name.startswith(inside)]


def describe_compressed_tensors(
    group: int | None, kept: Kept, *, layout: str, weights: Json, inputs: Json | None = None
) -> Json:
    """``quantization_config`` of compressed-tensors; ``group`` goes into ``weights`` if it groups columns."""
    ignore = ["lm_head", *(f"re:{one}" for one in kept.expressions)] if kept.patterns else list(kept.modules)
    common = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    sizes = {"group_size": group if weights["strategy"] in ("group", "tensor_group") else None}
    if weights["strategy"] == "block":
        sizes["block_structure"] = [group, group]  # type: ignore[assignment]
    scheme = {
        "format": layout,
        "input_activations": None if inputs is None else {**common, "group_size": None, **inputs},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**common, "observer_kwargs": {}, **sizes, **weights},
    }
    return {
        "config_groups": {"group_0": scheme},
        "format": layout,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def describe_fp8(group: int | None, kept: Kept, *, activations: str, is_of_transformers: bool = False) -> Json:
    """Of Qwen's and DeepSeek's FP8 blocks (with a group), and of tensors by AutoFP8 or by transformers."""
    if is_of_transformers:
        return {
            "activation_scheme": activations,
            "dequantize": False,
            "expert_dtype": "fp8",
            "modules_to_convert": None,
            "modules_to_not_convert": kept.prefixes,
            "quant_method": "fp8",
            "scale_fmt": "float",
            "weight_block_size": None,
        }
    if group is None:
        return {"quant_method": "fp8", "activation_scheme": activations, "ignored_layers": kept.prefixes}
    return {
        "activation_scheme": activations,
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [group, group],
        "modules_to_not_convert": kept.prefixes,
    }


def describe_awq(group: int | None, kept: Kept) -> Json:
    others = [name for name in kept.prefixes if name != "lm_head"]
    return {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": others or None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def describe_gptq(
    group: int | None, kept: Kept, *, bits: int = 4, sym: bool = True, version: int = 1, ordered: bool = False
) -> Json:
    """As transformers writes it for version 1, else, or if layers are kept, as GPTQModel does."""
    numbers = {
        "bits": bits,
        "damp_percent": 0.01,
        "desc_act": ordered,
        "group_size": -1 if group is None else group,
        "quant_method": "gptq",
        "sym": sym,
        "true_sequential": True,
    }
    dynamic: Json = {f"-:{one}": {} for one in kept.expressions if kept.patterns or one.startswith("model")}
    if version == 1 and not dynamic:
        return {**numbers, **_OPTIONS_OF_TRANSFORMERS}
    return {
        **numbers,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:4.0.0"], "uri": "https://github.com/modelcloud/gptqmodel", "mse": 0.0},
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }


def describe_modelopt(group: int | None, kept: Kept, *, algorithm: str, kv: bool = False) -> Json:
    numbers: Json = {"dynamic": False, "num_bits": 8 if group is None else 4, "type": "float"}
    numbers |= {} if group is None else {"group_size": group}
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": _modelopt_names(kept),
        **({"kv_cache_scheme": cache} if kv else {}),
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_algo": algorithm,
        "quant_method": "modelopt",
    }


def modelopt_files(group: int | None, kept: Kept, *, algorithm: str, kv: bool = False) -> dict[str, Json]:
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if kv else None,
        **({} if group is None else {"group_size": group}),
        "exclude_modules": _modelopt_names(kept),
    }
    producer = {"name": "modelopt", "version": "0.37.0"}
    return {"hf_quant_config.json": {"producer": producer, "quantization": quantization}}


def _modelopt_names(kept: Kept) -> list[str]:
    if not kept.patterns:
        return list(kept.modules)
    return ["lm_head", "*.gate", *(f"model.layers.{layer}*" for layer in kept.layers)]


def describe_mxfp8(group: int | None, kept: Kept) -> Json:
    return {
        "activation_scheme": "dynamic",
        "fmt": "mxfp8",
        "ignored_layers": kept.prefixes,
        "quant_method": "mxfp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [1, 32],
    }


def describe_quark(group: int | None, kept: Kept, *, weight: Json, inputs: Json) -> Json:
    """As AMD's checkpoints have it."""
    common = {"is_dynamic": False, "observer_cls": "PerBlockMXObserver", "round_method": "half_even", "symmetric": None}
    tensors = {"weight": {**common, **weight}, "input_tensors": {**common, **inputs}}
    return {
        "algo_config": None,
        "exclude": list(kept.modules) if not kept.patterns else ["lm_head", *(f"re:{one}" for one in kept.expressions)],
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder"},
        "global_quant_config": {**tensors, "bias": None, "output_tensors": None, "target_device": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": "0.9",
    }


def describe_mxfp4(group: int | None, kept: Kept) -> Json:
    kept_of_release = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"modules_to_not_convert": kept_of_release, "quant_method": "mxfp4"}
