"""int8 weights on CPUs, loaded as dense ones and quantised here (``kernels/quantization/int8_products.py``)."""

from collections.abc import Mapping

import torch

from tp_engine.kernels.candidates import DEFAULTS, Choices, Shape, build
from tp_engine.kernels.quantization.int8_products import NAME, Int8ByRows, Int8Weight, quantise_weight, shape_of
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.dense import Dense, ThenGate
from tp_engine.layers.quantization.stored import LinearShape

# The code's own choice keeps a weight twice: in C's order for few rows, and in oneDNN's for many.
_ORDERS = 2


class Int8(Dense):
    """Weights that are loaded as dense, then quantised."""

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        product = choose_int8_product(quantise_weight(parameters["weight"]), dtype, self.choices)
        return product if shape.activation is None else ThenGate(product, shape.activation, "cpu")

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        if name != "weight":
            return super().kept_bytes(name, weight)
        return _ORDERS * len(weight) * sum(one.nbytes for one in quantise_weight(weight.detach()[:1]))

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> tuple[str, Shape] | None:
        return NAME, shape_of(parameters["weight"], dtype)


def choose_int8_product(weight: Int8Weight, dtype: torch.dtype, choices: Choices = DEFAULTS) -> Int8ByRows:
    """The products of ``weight`` with rows of ``dtype``, by their number.  ``ConfigError`` if oneDNN refuses it."""
    shape = shape_of(weight.codes, dtype)
    return Int8ByRows(build(NAME, weight, shape, choices.of(NAME, shape, weight.codes.device)))
