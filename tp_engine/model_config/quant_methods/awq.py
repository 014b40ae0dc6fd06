"""``awq``: 4 bits with zero points, in the order of AutoAWQ's ``gemm``."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods.gptq import NOTES
from tp_engine.model_config.quantization import EVERY_MODULE, QuantizationSpec, WeightScheme

METHODS = ("awq",)
_BITS = 4


def read(config: ConfigJson) -> QuantizationSpec:
    """Keys of AutoAWQ, of transformers, and of GPTQModel, whose files name the order again, and GPTQ's options."""
    bits = config.take_either(int, "bits", "w_bit")
    if bits not in (None, _BITS):
        raise config.refusal("bits", bits, f"AWQ has {_BITS}", "look for such a checkpoint, or for GPTQ of 8 bits")
    for key in ("version", "checkpoint_format", "format"):
        version = config.take(key, str, "gemm")
        if version is None or version.lower() != "gemm":
            raise config.refusal(
                key,
                version,
                "this engine reads the order 'gemm'",
                "look for a checkpoint with it, or save this one again by AutoAWQ with version gemm",
            )
    config.expect("pack_dtype", str, "int32")
    config.expect("method", str, "awq")
    config.expect("zero_point", bool, True)
    config.skip("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "desc_act", "sym", *NOTES)
    group = config.take_either(int, "group_size", "q_group_size") or 128
    scheme = WeightScheme(
        packing="awq", kind="int4", group=None if group == -1 else group, has_zeros=True, scale_name="scales"
    )
    ignored = config.take_names("modules_to_not_convert")
    head = scheme if config.take("lm_head", bool, False) else None
    return QuantizationSpec(
        method="awq",
        rules=(*((name, None) for name in ignored), ("lm_head", head), (EVERY_MODULE, scheme)),
        is_found_by_tensors=True,
    )
