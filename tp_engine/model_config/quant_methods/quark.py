"""``quark``: AMD's FP8, with a scale per tensor or row, and MXFP4, by layer, type of layer or for all.

MXFP4 says whether inputs were rounded to the same blocks.
"""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods.compressed_tensors import KV_SCALES
from tp_engine.model_config.quantization import EVERY_MODULE, Activations, QuantizationSpec, WeightScheme

METHODS = ("quark",)
_MXFP4 = WeightScheme(packing="mxfp4-weight", kind="e2m1", group=32)
_REMEDY = "look for FP8 or MXFP4 of quark, or for another maker's checkpoint"
# How the numbers were found, and where.
_NOTES = (
    "algo_config", "custom_mode", "export", "kv_cache_post_rope", "quant_mode", "softmax_quant_spec", "version",
    "kv_cache_group", "min_kv_scale", "pack_method", "weight_format", "weight_merge_groups", "log_severity_level",
)  # fmt: skip
_NOTES_OF_TENSORS = (
    "ch_axis", "is_scale_quant", "mx_element_dtype", "observer_cls", "observer_kwargs", "qat_spec", "range_estimator",
    "round_method", "scale_calculation_mode", "scale_type", "symmetric", "zero_point_type", "enable_buffer",
    "group_size", "scale_format", "block_size",
)  # fmt: skip


def read(config: ConfigJson) -> QuantizationSpec:
    """Excluded modules come first, then those that are named, then types of layers, then all."""
    config.skip(*_NOTES)
    ignored = config.take_names("exclude")
    named, types = config.take_object("layer_quant_config"), config.take_object("layer_type_quant_config")
    rules: list[tuple[str, WeightScheme | None]] = [(name, None) for name in ignored]
    for name, own in ({} if named is None else named.objects()).items():
        rules.append((name, _scheme(own)))
    for name, own in ({} if types is None else types.objects()).items():
        if name != "Linear":
            rule = "of classes, only Linear can be quantised here"
            raise config.refusal("layer_type_quant_config", name, rule, _REMEDY)
        rules.append((EVERY_MODULE, _scheme(own)))
    whole = config.take_object("global_quant_config")
    if whole is not None:
        rules.append((EVERY_MODULE, _scheme(whole)))
    return QuantizationSpec(
        method="quark",
        rules=tuple(rules),
        skipped=("input_scale", "output_scale", "weight_zero_point", "input_zero_point", *KV_SCALES),
        has_kv_scales=_has_kv_scales(config),
        is_found_by_tensors=True,
    )


def _scheme(config: ConfigJson) -> WeightScheme | None:
    config.skip("target_device", "output_tensors")  # of outputs only those that go into a cache are quantised
    if config.take("bias", dict):
        raise config.refusal("bias", "not null", "biases stay as they are", _REMEDY)
    weight, inputs = _tensor(config, "weight"), _tensor(config, "input_tensors")
    config.finish_strictly()
    if weight is None:
        return None
    kind, scheme, is_dynamic = weight
    if is_dynamic:
        raise config.refusal("is_dynamic", True, "weights must have stored scales", _REMEDY)
    if kind == "fp4" and scheme == "per_group":
        is_rounded = inputs == ("fp4", "per_group", True)
        return replace(_MXFP4, input_blocks="mxfp4") if is_rounded else _MXFP4
    if kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return WeightScheme(
            packing="plain",
            kind="e4m3",
            row_block=None if scheme == "per_tensor" else 1,
            activations=_activations(inputs),
        )
    known = "fp8_e4m3 per_tensor or per_channel, and fp4 per_group of 32 with scales in e8m0"
    raise config.refusal("weight", f"{kind} {scheme}", f"this engine reads {known}", _REMEDY)


def _activations(inputs: tuple[str, str, bool] | None) -> Activations | None:
    if inputs is None or inputs[0] != "fp8_e4m3":
        return None
    return "token" if inputs[2] else "tensor"


def _tensor(config: ConfigJson, name: str) -> tuple[str, str, bool] | None:
    """The type of a tensor's numbers, what a scale covers, and whether scales are found while running."""
    own = config.take_object(name)
    if own is None:
        return None
    kind, scheme = own.require("dtype", str), own.require("qscheme", str)
    if scheme == "per_group" and (kind, own.peek("group_size"), own.peek("scale_format")) != ("fp4", 32, "e8m0"):
        found = f"{kind} in groups of {own.peek('group_size')} with scales in {own.peek('scale_format')}"
        if name == "weight":
            raise own.refusal("dtype", found, "groups are those of MXFP4: fp4, 32, e8m0", _REMEDY)
    own.skip(*_NOTES_OF_TENSORS)
    is_dynamic = own.take("is_dynamic", bool, False)
    own.finish_strictly()
    return kind, scheme, bool(is_dynamic)


def _has_kv_scales(config: ConfigJson) -> bool:
    """``kv_cache_quant_config`` names the projections of keys and values, each with what is done with its outputs."""
    caches = config.take_object("kv_cache_quant_config")
    kinds = set()
    for own in ({} if caches is None else caches.objects()).values():
        outputs = own.take_object("output_tensors")
        kinds.add(None if outputs is None else outputs.peek("dtype"))
    if kinds - {None, "fp8_e4m3"}:
        found = ", ".join(map(str, kinds))
        raise config.refusal("kv_cache_quant_config", found, "scales of a KV cache are for fp8", _REMEDY)
    return "fp8_e4m3" in kinds
