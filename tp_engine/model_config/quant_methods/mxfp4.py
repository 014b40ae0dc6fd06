"""``mxfp4``: gpt-oss's experts in blocks of 32 codes of 4 bits with a power of two for each block."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import QuantizationSpec, WeightScheme

METHODS = ("mxfp4",)
BLOCK = 32


def read(config: ConfigJson) -> QuantizationSpec:
    """Only experts are quantised, whether the list names all other modules or not."""
    config.expect("dequantize", bool, False)
    ignored = config.take_names("modules_to_not_convert")
    scheme = WeightScheme(packing="mxfp4", kind="e2m1", group=BLOCK, scale_name="scales")
    return QuantizationSpec(method="mxfp4", rules=(*((name, None) for name in ignored), ("experts", scheme)))
