"""What checkpoints declare about the inputs of linear layers in blocks, which ``--round-activations`` asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.model_config.test_model_config import llama
from tests.unit.model_config.test_quantization_config import MIXED, Q, compressed, read, weights
from tp_engine.errors import ConfigError
from tp_engine.model_config import read_model, with_rounded_inputs

NVFP4, MX = weights(4, "float", "tensor_group", group_size=16), {"group_size": 32, "scale_dtype": "torch.uint8"}
MXFP4, MXFP8 = weights(4, "float", "group", **MX), weights(8, "float", "group", **MX)
LOCAL = {"dynamic": "local"}
QUARK = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False,
    "ch_axis": -1,
}  # fmt: skip


def quark(inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Weights of MXFP4."""
    return {"quant_method": "quark", "global_quant_config": {"weight": QUARK, "input_tensors": inputs}}


DECLARED: dict[str, tuple[dict[str, Any], str | None]] = {
    "nvfp4": (compressed("nvfp4-pack-quantized", NVFP4, {**NVFP4, **LOCAL}), "nvfp4"),
    "nvfp4, weights alone": (compressed("nvfp4-pack-quantized", NVFP4), None),
    "nvfp4, inputs of 8 bits": (compressed("nvfp4-pack-quantized", NVFP4, weights(8, "float", "token")), None),
    "nvfp4, other groups": (compressed("nvfp4-pack-quantized", NVFP4, {**NVFP4, **LOCAL, "group_size": 32}), None),
    "mxfp4": (compressed("mxfp4-pack-quantized", MXFP4, {**MXFP4, "dynamic": True}), "mxfp4"),
    "mxfp4, weights alone": (compressed("mxfp4-pack-quantized", MXFP4), None),
    "mxfp8": (compressed("mxfp8-quantized", MXFP8, {**MXFP8, "dynamic": True}), "mxfp8"),
    "integers": (compressed("pack-quantized", weights(group_size=128), {**NVFP4, **LOCAL}), None),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    "modelopt, weights alone": ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, None),
    "modelopt, inputs of another format": ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, None),
    "modelopt, mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8"),
    "mixed": ({**MIXED, "quantized_layers": {Q: {"quant_algo": "NVFP4"}}}, "nvfp4"),
    "a method of its own": ({"quant_method": "mxfp8", "activation_scheme": "dynamic"}, "mxfp8"),
    "a method of its own, without inputs": ({"quant_method": "mxfp8"}, None),
    "quark": (quark({**QUARK, "is_dynamic": True}), "mxfp4"),
    "quark, weights alone": (quark(None), None),
    "experts of gpt-oss": ({"quant_method": "mxfp4"}, None),
}


@pytest.mark.parametrize("name", DECLARED)
def test_inputs_are_as_declared(name: str) -> None:
    """Oracle: what the makers' files say; without the option, inputs are whole, and without a word of them, it is
    refused."""
    config, expected = DECLARED[name]
    whole = read(config).scheme_of(Q)
    assert whole is None or whole.input_blocks is None
    model = read_model(llama(quantization_config=config))
    if expected is None:
        with pytest.raises(ConfigError, match="does not say that activations are NVFP4, MXFP4 or MXFP8"):
            with_rounded_inputs(model)
    else:
        found = with_rounded_inputs(model)
        scheme = found.scheme_of(Q)
        assert scheme is not None and scheme.input_blocks == expected
        assert repr(found) != repr(model), "stored blocks of a KV cache are told apart by the model's description"


def test_an_unquantised_checkpoint_declares_nothing() -> None:
    """Oracle: the error, with its remedy."""
    with pytest.raises(ConfigError, match="not quantised; leave round_activations out"):
        with_rounded_inputs(read_model(llama()))
