"""The methods of quantisation that the engine reads: one file per method, found automatically.  No torch.

A file lists the ``METHODS`` of ``quantization_config`` that it describes, and its ``read`` turns that object into a
``QuantizationSpec``.  docs/models.md has the table.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quantization import Blocks, QuantizationSpec

_REMEDY = (
    "take another upload of the same model: one whose name ends in FP8, AWQ, GPTQ-Int4, NVFP4, MXFP4, w4a16 or w8a8, "
    "or its maker's own, which --quantization int8 or int4 makes as small"
)

# Methods that are refused: why.
REFUSED = {
    "bitsandbytes": "its blocks run over the ends of rows, so that ranks cannot share a weight",
    "gguf": "its files are llama.cpp's",
    "hqq": "its layout is not read",
    "exl2": "its layout is ExLlama's",
    "exl3": "its layout is ExLlama's",
    "aqlm": "its codebooks are not read",
    "quip": "its codebooks are not read",
    "vptq": "its codebooks are not read",
    "eetq": "its layout is not read",
    "quanto": "its layout is not read",
    "torchao": "its layout is not read",
    "w4afp8": "its integers of 4 bits are in an order of SGLang's",
    "fp_quant": "rotations of activations are not computed here",
    "fbgemm_fp8": "its layout is not read",
    "bitnet": "its weights of 2 bits are not read",
    "spqr": "its layout is not read",
    "higgs": "its layout is not read",
}


@cache
def quant_methods() -> dict[str, Callable[[ConfigJson], QuantizationSpec]]:
    """Return the reader of each ``quant_method``."""
    readers: dict[str, Callable[[ConfigJson], QuantizationSpec]] = {}
    for found in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{found}")
        readers |= dict.fromkeys(module.METHODS, module.read)
    return readers


def read_quantization(config: ConfigJson) -> QuantizationSpec | None:
    """Return the quantisation that ``config`` describes; None without one.

    Raises ``ConfigError`` for a method, a value or a key that the engine does not serve.
    """
    own = config.take_object("quantization_config") or config.take_object("compression_config")
    if own is None:
        return None
    method = _method(own)
    reader = quant_methods().get(method)
    if reader is None:
        why = REFUSED.get(method, f"it serves {', '.join(quant_methods())}")
        raise ConfigError(
            f"config.json: quantization_config: quant_method is {shown(method)}, which is not served here: {why}; "
            f"{_REMEDY}"
        )
    found = reader(own)
    own.finish_strictly()
    return found


def input_blocks(quantization_config: Mapping[str, Any]) -> Blocks:
    """Return the blocks that a ``quantization_config`` declares for inputs; of several, those of the fewest bits."""
    found = read_quantization(ConfigJson({"quantization_config": quantization_config}))
    assert found is not None, "with_rounded_inputs has looked for it"
    kinds = {scheme.input_blocks for _, scheme in found.rules if scheme is not None}
    ranked: tuple[Blocks, ...] = ("mxfp4", "nvfp4", "mxfp8")
    return next(kind for kind in ranked if kind in kinds)


def _method(config: ConfigJson) -> str:
    """``quant_method``; modelopt's older files do not have it, but name their maker, or their algorithm by its key."""
    producer = config.peek("producer")
    if config.peek("quant_method") is not None:
        return config.require("quant_method", str).lower().removeprefix("intel/")  # AutoRound's older files
    maker = producer.get("name") if isinstance(producer, dict) else producer
    if maker == "modelopt" or (maker is None and config.has("quant_algo")):
        return "modelopt"
    if {"group_size", "bits"} <= set(config.names):
        raise config.refusal("quant_method", None, "these are MLX's keys, whose layout is not read", _REMEDY)
    return config.require("quant_method", str).lower()
