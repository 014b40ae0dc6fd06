"""``mxfp8``: weights in float8_e4m3fn with a power of two for each 32 columns (OCP microscaling formats).

``activation_scheme`` dynamic: inputs were rounded to the same blocks.
"""

from dataclasses import replace

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("mxfp8",)
_SCHEME = WeightScheme(packing="mxfp8", kind="e4m3", group=32)
_CHOICES = {
    "fmt": ("e4m3", "mxfp8", "float8_e4m3fn"),
    "scale_fmt": ("ue8m0",),
    "activation_scheme": ("dynamic",),
}


def read(config: ConfigJson) -> QuantizationSpec:
    """Without a list of modules, all but the output head are quantised."""
    scheme = replace(_SCHEME, input_blocks="mxfp8") if config.has("activation_scheme") else _SCHEME
    for name, choices in _CHOICES.items():
        config.take_one_of(name, *choices, remedy="use another checkpoint")
    block = config.take_block("weight_block_size") or (1, 32)
    if block != (1, 32):
        raise config.refusal("weight_block_size", list(block), "MXFP8 has [1, 32]", "use another checkpoint")
    config.expect("group_size", int, 32)
    config.expect("is_checkpoint_mxfp8_serialized", bool, True)
    config.skip("dequantize", "version")
    ignored = config.take_names("modules_to_not_convert", "ignored_layers", "ignore")
    return QuantizationSpec(
        method="mxfp8",
        rules=(*((name, None) for name in (*ignored, "lm_head")), (EVERY_MODULE, scheme)),
        skipped=("input_scale",),
    )
