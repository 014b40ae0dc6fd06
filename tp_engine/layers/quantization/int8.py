"""``x @ weight.T + bias`` with int8 weights on CPUs: dynamic quantisation, integer products by oneDNN.

::

    weight[o, i]  ~  w[o, i] * w_scale[o]        int8, symmetric: w_scale[o] = max |weight[o]| / 127, found at load
    x[n, i]       ~  (u[n, i] - 128) * scale[n]  8 bits, symmetric, one scale per row, found in every step

    out[n, o] = scale[n] * w_scale[o] * (sum_i u[n, i] w[o, i] - 128 sum_i w[o, i]) + bias[o]
                                        int32                    a constant of the weight

Each rank quantises its own part of a weight.  For a column-parallel weight that changes nothing, because a row has its
scale either way; for a row-parallel weight the scales become finer, because each rank has its own for its columns.

oneDNN's product with a packed weight (``torch.ops.onednn.qlinear_pointwise``) takes one scale for all of ``x``: 1
here; the rows' scales are applied before and after it (``kernels/quantization/int8_rows.py``).  It was chosen over
``torch.ops.quantized.linear_dynamic``, whose one scale for all rows lets a request change its neighbours' results and
whose quantised tensors PyTorch has deprecated; over ``torch._weight_int8pack_mm``, which computes in floats; and over
``torch._int_mm``, which keeps no packed weight.  docs/benchmarks.md has the times.  The functions belong to torch's
private interface, so they are tried, and their results compared, before they are used.
"""

from collections.abc import Mapping
from functools import cache

import torch

from tp_engine.errors import ConfigError
from tp_engine.kernels.ops import int8_rows
from tp_engine.kernels.quantization.int8_rows import CODE_OFFSET, LARGEST_CODE
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.dense import Dense, ThenGate
from tp_engine.layers.quantization.stored import LinearShape

_REMEDY = "leave quantization out, or use a PyTorch for x86 with oneDNN on a CPU with VNNI"
_SMALLEST_LARGEST = 1e-30  # keeps the scale of a row of zeros from being zero

_trusted: dict[torch.Size, bool] = {}


class Int8(Dense):
    """Weights that are loaded as dense, then quantised."""

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        product = make_int8_linear(*quantise_weight(parameters["weight"]))
        return product if shape.activation is None else ThenGate(product, shape.activation, "cpu")

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        if name != "weight":
            return super().kept_bytes(name, weight)
        return len(weight) * sum(one.nbytes for one in quantise_weight(weight.detach()[:1]))


class Int8Linear:
    """A weight (out, in) as int8 in oneDNN's blocked order; the original is no longer needed.

    Raises ``AttributeError`` or ``RuntimeError`` if oneDNN cannot take it.
    """

    is_recordable = False

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """``codes`` (out, in) int8, ``scales`` (out,) float32."""
        self._packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
        self._scales = scales
        self._offset = codes.sum(1, dtype=torch.int32) * scales * -CODE_OFFSET
        self._zeros = torch.zeros(len(codes), dtype=torch.int8, device="cpu")
        self._rows = int8_rows()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        codes, scales = self._rows.quantise(x)
        return self._rows.scale(self.products(codes), scales, bias, x.dtype)

    def products(self, codes: torch.Tensor) -> torch.Tensor:
        """``codes`` (N, in) uint8 -> (N, out) float32: ``(codes - 128) @ weight.T``, the weight's scales included."""
        found: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 0, self._packed, self._scales, self._zeros, self._offset,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return found


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` (out, in) -> codes (out, in) int8 and scales (out,) float32, one per output channel."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(_SMALLEST_LARGEST) / LARGEST_CODE
    return (wide / scales.unsqueeze(1)).round_().to(torch.int8), scales


def make_int8_linear(codes: torch.Tensor, scales: torch.Tensor) -> Int8Linear:
    """Return the product of a weight, compared with plain arithmetic once per shape.  Raises ``ConfigError``.

    ``codes`` (out, in) int8, ``scales`` (out,) float32.
    """
    shape = codes.shape
    try:
        product = Int8Linear(codes, scales)
        if shape not in _trusted:
            _trusted[shape] = _agrees(product, codes, scales)
    except (AttributeError, RuntimeError) as error:
        raise _refusal(f"oneDNN refuses a weight of shape {tuple(shape)}: {error}") from error
    if not _trusted[shape]:
        raise _refusal(f"oneDNN's product with a weight of shape {tuple(shape)} is wrong")
    return product


def takes_int8_products(device_type: str) -> bool:
    """Return whether this machine's products of 8-bit integers are exact, so that checkpoints with them can be served
    so."""
    return device_type == "cpu" and _problem() is None


def check_int8(device_type: str) -> None:
    """Raise ``ConfigError`` unless ``device_type`` can have int8 weights; tries a small product, once."""
    if device_type != "cpu":
        raise ConfigError(
            f"quantization is int8, which is for CPUs, but the model runs on {device_type}; leave quantization out, or "
            "set device=cpu"
        )
    if found := _problem():
        raise _refusal(found)


@cache
def _problem() -> str | None:
    """What is wrong with this machine's products of the largest codes; without VNNI their sums saturate 16 bits."""
    codes = torch.full((32, 64), LARGEST_CODE, dtype=torch.int8, device="cpu")
    codes[::2] *= -1
    scales = torch.ones(32, dtype=torch.float32, device="cpu")
    try:
        agrees = _agrees(Int8Linear(codes, scales), codes, scales)
    except (AttributeError, RuntimeError) as error:
        return f"this PyTorch has no oneDNN product of int8 weights ({error})"
    return None if agrees else "this machine's products of 8-bit integers are not exact"


def _agrees(product: Int8Linear, codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the products of a row of largest codes and of a random row equal float64's up to float32's rounding."""
    x = torch.randint(
        1, 256, (2, codes.shape[1]), dtype=torch.uint8, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    x[0] = 255
    wide = x.double() - CODE_OFFSET
    expected = torch.stack([(codes * row).sum(1, dtype=torch.float64) for row in wide]) * scales
    size = (
        (x.double() @ torch.ones(codes.shape[1], dtype=torch.float32, device="cpu").double()).max()
        * LARGEST_CODE
        * scales.max()
    )
    return bool((product.products(x) - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * size)


def _refusal(found: str) -> ConfigError:
    return ConfigError(f"quantization is int8, but {found}; {_REMEDY}")
