"""``modelopt``: NVIDIA's FP8 with a scale per tensor, and NVFP4, in config.json or in hf_quant_config.json."""

from __future__ import annotations

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods.compressed_tensors import KV_SCALES, has_kv_scales
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("modelopt", "modelopt_fp4")
BLOCK = 16
_SCHEMES = {
    "FP8": WeightScheme(packing="plain", kind="e4m3", row_block=None, activations="tensor"),
    "NVFP4": WeightScheme(packing="modelopt-nvfp4", kind="e2m1", group=BLOCK),
}


def read(config: ConfigJson) -> QuantizationSpec:
    """Keys of both files; in one of them all stands one level deeper."""
    config.skip("quant_method", "producer", "version")
    inner = config.take_object("quantization")
    if inner is not None:
        config.finish()
        config = inner
    algorithm = config.require("quant_algo", str).upper()
    if algorithm not in _SCHEMES:
        raise config.refusal(
            "quant_algo",
            algorithm,
            f"this engine reads {' and '.join(_SCHEMES)} of modelopt",
            "look for such a checkpoint, or one in FP8 or w4a16 of compressed-tensors",
        )
    group = config.take("group_size", int, BLOCK)
    if algorithm == "NVFP4" and group != BLOCK:
        raise config.refusal("group_size", group, f"NVFP4 has blocks of {BLOCK}", "use another checkpoint")
    groups = config.take_object("config_groups")
    for one in () if groups is None else groups.objects().values():
        if one.take_names("targets") != ("Linear",):
            raise one.refusal("targets", one.peek("targets"), "it must be ['Linear']", "use another checkpoint")
    ignored = config.take_names("exclude_modules", "ignore")
    has_scales = _has_kv_scales(config)
    config.finish()
    return QuantizationSpec(
        method=f"modelopt {algorithm}",
        rules=(*((name, None) for name in ignored), (EVERY_MODULE, _SCHEMES[algorithm])),
        skipped=("input_scale", *KV_SCALES),
        has_kv_scales=has_scales,
    )


def _has_kv_scales(config: ConfigJson) -> bool:
    """``kv_cache_quant_algo`` in one file, ``kv_cache_scheme`` in the other."""
    name = (config.take("kv_cache_quant_algo", str) or "none").lower()
    if name not in ("none", "auto", "fp8"):
        raise config.refusal("kv_cache_quant_algo", name, "scales of a KV cache are for fp8", "use another checkpoint")
    return has_kv_scales(config) or name == "fp8"
