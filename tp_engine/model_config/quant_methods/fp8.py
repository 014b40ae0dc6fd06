"""``fp8``: weights in float8_e4m3fn with a scale for each block (DeepSeek, Qwen3, MiniMax) or one for each tensor."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods.compressed_tensors import KV_SCALES
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("fp8",)
_CHOICES = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float32", "float", "ue8m0"),  # ue8m0: in float32 (DeepSeek-V3.1) or 8 bits
    "expert_dtype": ("fp8",),
    "store_dtype": ("fp8", "e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
}


def read(config: ConfigJson) -> QuantizationSpec:
    """Without a list of modules, all but the output head are quantised."""
    for name, choices in _CHOICES.items():
        config.take_one_of(name, *choices, remedy="use another checkpoint")
    config.expect("is_checkpoint_fp8_serialized", bool, True)
    config.skip("dequantize", "version")
    has_kv_scales = config.take_one_of("kv_cache_scheme", "none", "static", remedy="use another checkpoint") == "static"
    static = config.take("activation_scheme", str) == "static"
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
        skipped=("input_scale", "activation_scale", "kv_scale", *KV_SCALES),
        has_kv_scales=has_kv_scales,
    )
