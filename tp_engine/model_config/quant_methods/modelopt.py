"""``modelopt``: NVIDIA's FP8 with a scale per tensor, row or block, MXFP8 and NVFP4, alone or mixed, in config.json or
in hf_quant_config.json.

Inputs of NVFP4 and MXFP8 were rounded to the same blocks, those of ``W4A16_NVFP4`` were not."""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods.compressed_tensors import KV_SCALES, has_kv_scales
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mxfp8")
MIXED = "MIXED_PRECISION"
_NVFP4 = WeightScheme(packing="modelopt-nvfp4", kind="e2m1", group=16)
_SCHEMES = {
    "FP8": WeightScheme(packing="plain", kind="e4m3", row_block=None, activations="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme(packing="plain", kind="e4m3", activations="token"),
    "FP8_PB_WO": WeightScheme(packing="plain", kind="e4m3", group=128, row_block=128),
    "MXFP8": WeightScheme(packing="mxfp8", kind="e4m3", group=32, input_blocks="mxfp8"),
    "W4A8_MXFP4_FP8": WeightScheme(packing="mxfp4-weight", kind="e2m1", group=32),
    "NVFP4": replace(_NVFP4, input_blocks="nvfp4"),
    "W4A16_NVFP4": _NVFP4,
}


def read(config: ConfigJson) -> QuantizationSpec:
    """Keys of both files; in one of them all stands one level deeper."""
    config.skip("quant_method", "producer", "version")
    inner = config.take_object("quantization")
    if inner is not None:
        config.finish_strictly()
        config = inner
    algorithm = config.require("quant_algo", str).upper()
    ignored = tuple((name, None) for name in config.take_names("exclude_modules", "ignore"))
    rules = _named(config) if algorithm == MIXED else ((EVERY_MODULE, _scheme(config, algorithm)),)
    _check_groups(config, tuple(name for name, _ in rules) if algorithm == MIXED else ("Linear",))
    has_scales = _has_kv_scales(config)
    config.finish_strictly()
    return QuantizationSpec(
        method=f"modelopt {algorithm}",
        rules=(*ignored, *rules),
        skipped=("input_scale", *KV_SCALES),
        has_kv_scales=has_scales,
    )


def _named(config: ConfigJson) -> tuple[tuple[str, WeightScheme | None], ...]:
    """The modules of ``quantized_layers``, each with its algorithm; others are not quantised.

    Those of multi-token prediction are not run, so theirs may be any.
    """
    layers = config.take_object("quantized_layers")
    config.skip("group_size")  # each layer has its own
    if layers is None:
        raise config.refusal("quantized_layers", None, f"{MIXED} must name its layers", "use a complete checkpoint")
    found: list[tuple[str, WeightScheme | None]] = []
    for name, layer in layers.objects().items():
        if name.removeprefix("model.").startswith("mtp"):
            found.append((name, None))
            continue
        found.append((name, _scheme(layer, layer.require("quant_algo", str).upper())))
        layer.finish_strictly("kv_cache_quant_algo")
    return tuple(found)


def _scheme(config: ConfigJson, algorithm: str) -> WeightScheme:
    if algorithm not in _SCHEMES:
        why = "its scales of inputs (pre_quant_scale) are not applied; " if algorithm.endswith("_AWQ") else ""
        raise config.refusal(
            "quant_algo",
            algorithm,
            f"{why}this engine reads {', '.join(_SCHEMES)} of modelopt",
            "look for such a checkpoint, or one in FP8 or w4a16 of compressed-tensors",
        )
    scheme, group = _SCHEMES[algorithm], config.take("group_size", int)
    if scheme.group is not None and group not in (None, scheme.group):
        rule = f"{algorithm} has blocks of {scheme.group}"
        raise config.refusal("group_size", group, rule, "use another checkpoint")
    return scheme


def _check_groups(config: ConfigJson, targets: tuple[str, ...]) -> None:
    """``config_groups`` repeat the rest in the words of another library: the modules that they name must be
    ``targets``."""
    groups = config.take_object("config_groups")
    for group in () if groups is None else groups.objects().values():
        if not set(group.take_names("targets")) <= set(targets):
            rule = "it must be ['Linear']" if targets == ("Linear",) else "it must be of quantized_layers"
            raise group.refusal("targets", group.peek("targets"), rule, "use another checkpoint")


def _has_kv_scales(config: ConfigJson) -> bool:
    """``kv_cache_quant_algo`` in one file, ``kv_cache_scheme`` in the other, which may be a name too."""
    keys = ["kv_cache_quant_algo", *(("kv_cache_scheme",) if isinstance(config.peek("kv_cache_scheme"), str) else ())]
    names = {key: (config.take(key, str) or "none").lower() for key in keys}
    for key, name in names.items():
        if name not in ("none", "auto", "fp8"):
            raise config.refusal(key, name, "scales of a KV cache are for fp8", "use another checkpoint")
    return "fp8" in names.values() or ("kv_cache_scheme" not in names and has_kv_scales(config))
