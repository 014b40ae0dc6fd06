"""``fp8``: weights in float8_e4m3fn with a scale for each block (DeepSeek, Qwen3, MiniMax) or one for each tensor."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("fp8",)
_FORMATS = ("e4m3", "float8_e4m3fn")
_SCALES = ("float32", "ue8m0")  # the second are powers of two, stored in float32 all the same (DeepSeek-V3.1)


def read(config: ConfigJson) -> QuantizationSpec:
    """Without a list of modules, all but the output head are quantised."""
    if (fmt := config.take("fmt", str, "e4m3")) not in _FORMATS:
        raise config.refusal("fmt", fmt, f"it must be {' or '.join(_FORMATS)}", "use another checkpoint")
    if (kind := config.take("scale_fmt", str, "float32")) not in _SCALES:
        raise config.refusal("scale_fmt", kind, f"it must be {' or '.join(_SCALES)}", "use another checkpoint")
    config.expect("is_checkpoint_fp8_serialized", bool, True)
    config.skip("dequantize", "version")
    scheme_of_inputs = config.take("activation_scheme", str, "dynamic")
    if scheme_of_inputs not in ("dynamic", "static"):
        raise config.refusal(
            "activation_scheme", scheme_of_inputs, "it must be 'dynamic' or 'static'", "use another checkpoint"
        )
    static = scheme_of_inputs == "static"
    block = config.take_block("weight_block_size")
    if block is not None and static:
        raise config.refusal("activation_scheme", "static", "blocks need 'dynamic'", "use another checkpoint")
    if block is None:
        scheme = WeightScheme(packing="plain", kind="e4m3", row_block=None, activations="tensor" if static else "token")
    else:
        scheme = WeightScheme(
            packing="plain", kind="e4m3", group=block[1], row_block=block[0],
            activations="group", scale_name="weight_scale_inv",
        )  # fmt: skip
    ignored = config.take_names("modules_to_not_convert", "ignored_layers", "ignore")
    return QuantizationSpec(
        method="fp8",
        rules=(*((name, None) for name in (*ignored, "lm_head")), (EVERY_MODULE, scheme)),
        skipped=("input_scale",),
    )
