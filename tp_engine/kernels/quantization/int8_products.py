"""``x @ weight.T + bias`` with int8 weights on CPUs: oneDNN's integer products, or C with the rows as they are.

::

    weight[o, i]  ~  w[o, i] * w_scale[o]        int8, symmetric: w_scale[o] = max |weight[o]| / 127, found at load
    x[n, i]       ~  (u[n, i] - 128) * scale[n]  8 bits, symmetric, one scale per row, found in every step

    out[n, o] = scale[n] * w_scale[o] * (sum_i u[n, i] w[o, i] - 128 sum_i w[o, i]) + bias[o]
                                        int32                    a constant of the weight

oneDNN rounds rows so, and is the fastest for many of them.  A product of few rows takes as long as reading the weight,
so rounding them costs more than it saves: C widens the weight as it reads (``cpu/quantised.py``), and rounds no row.
Each has the weight in an order of its own, so a product that has both keeps it twice.

oneDNN's product with a packed weight (``torch.ops.onednn.qlinear_pointwise``) takes one scale for all of ``x``, here 1;
the rows' scales are applied before and after it (``int8_rows.py``).  It was chosen over
``torch.ops.quantized.linear_dynamic``, whose one scale for all rows lets a request change its neighbours' results and
whose quantised tensors PyTorch has deprecated; over ``torch._weight_int8pack_mm``, which computes in floats; and over
``torch._int_mm``, which keeps no packed weight.  docs/benchmarks.md has the times.
The functions belong to torch's private interface, so their results are compared before they are used.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from tp_engine.cpu import QuantisedPanels, native_library
from tp_engine.errors import ConfigError
from tp_engine.kernels.candidates import MANY, Candidate, Choice, Inputs, Operation, Run, Shape, normal, pick
from tp_engine.kernels.ops import int8_rows
from tp_engine.kernels.quantization.int8_rows import CODE_OFFSET, LARGEST_CODE, TorchInt8Rows
from tp_engine.kernels.quantization.weights import QuantisedWeight

NAME = "int8_linear"
# C wins up to 4 to 7 rows, depending on the shape (Zen 4); the tuner may find more.
_FEW_ROWS = 4
_SMALLEST_LARGEST = 1e-30  # keeps the scale of a row of zeros from being zero
_REMEDY = "leave quantization out, or use a PyTorch for x86 with oneDNN on a CPU with VNNI"

_trusted: dict[torch.Size, bool] = {}


class Int8Weight(NamedTuple):
    """``codes`` (out, in) int8 and ``scales`` (out,) float32."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantise_weight(weight: torch.Tensor) -> Int8Weight:
    """``weight`` (out, in) -> codes and scales, one per output channel."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(_SMALLEST_LARGEST) / LARGEST_CODE
    return Int8Weight((wide / scales.unsqueeze(1)).round_().to(torch.int8), scales)


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


def make_int8_linear(codes: torch.Tensor, scales: torch.Tensor) -> Int8Linear:
    """The product with a weight, compared with plain arithmetic once per shape; ``ConfigError`` if it is refused or
    wrong.

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


class Int8ByRows:
    """The products with one weight, by the number of rows."""

    def __init__(self, parts: Sequence[tuple[int, Run]]) -> None:
        """``parts``: products, with the most rows for each."""
        self._parts = tuple(parts)
        self.is_recordable = all(isinstance(run, QuantisedPanels) for _, run in self._parts)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return pick(self._parts, len(x))(x, bias)


def takes_int8_products(device_type: str) -> bool:
    """Whether this machine's products of 8-bit integers are exact, as W8A8 checkpoints need them."""
    return device_type == "cpu" and _problem() is None


def check_int8(device_type: str) -> None:
    """Raise ``ConfigError`` unless ``device_type`` can have int8 weights, by a small product, tried once."""
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
    sizes = x.sum(1, keepdim=True, dtype=torch.float64) * LARGEST_CODE * scales  # of each result's sum
    return bool(((product.products(x) - expected).abs() <= 4 * torch.finfo(torch.float32).eps * sizes).all())


def _refusal(found: str) -> ConfigError:
    return ConfigError(f"quantization is int8, but {found}; {_REMEDY}")


def shape_of(codes: torch.Tensor, dtype: torch.dtype) -> Shape:
    """The shape of a product with ``codes`` (out, in), of rows of ``dtype``."""
    out_size, in_size = codes.shape
    return {"in": in_size, "out": out_size, "type": str(dtype).removeprefix("torch.")}


def _panels(weight: Int8Weight, shape: Shape) -> Run:
    library = native_library()
    assert library is not None, "why_not says so"
    codes = QuantisedWeight(kind="int8", codes=weight.codes.contiguous().view(torch.uint8), factors=weight.scales)
    return QuantisedPanels(library, codes, _dtype(shape))


def _why_no_panels(shape: Shape, device: torch.device) -> str | None:
    return "the C kernels cannot be had here" if native_library() is None else None


def _default(shape: Shape, device: torch.device) -> Choice:
    few = () if native_library() is None else ((_FEW_ROWS, "panels"),)
    return (*few, (MANY, "onednn"))


def _weights(shape: Shape, device: torch.device, generator: torch.Generator) -> Int8Weight:
    size = int(shape["out"]), int(shape["in"])
    return quantise_weight(normal(size, device, generator) * size[1] ** -0.5)


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    rows = normal((num_rows, int(shape["in"])), device, generator)
    bias = normal((int(shape["out"]),), device, generator)
    return rows.to(_dtype(shape)), bias.to(_dtype(shape))


def _twin(weight: Int8Weight, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin rounds rows to 8 bits, because the option asks for it; so may candidates."""
    x, bias = inputs
    wide = weight.codes.double() * weight.scales.double().unsqueeze(1)
    codes, scales = TorchInt8Rows().quantise(x)
    rounded = ((codes.double() - CODE_OFFSET) @ wide.T).float()
    return x.double() @ wide.T + bias.double(), TorchInt8Rows().scale(rounded, scales, bias, x.dtype)


def _dtype(shape: Shape) -> torch.dtype:
    found = getattr(torch, str(shape["type"]))
    assert isinstance(found, torch.dtype)
    return found


OPERATION = Operation(
    candidates=(
        Candidate(name="onednn", build=lambda weight, shape: make_int8_linear(*weight)),
        Candidate(name="panels", build=_panels, why_not=_why_no_panels),
    ),
    default=_default,
    weights=_weights,
    inputs=_inputs,
    twin=_twin,
    num_bytes=lambda shape: int(shape["in"]) * int(shape["out"]),
    sources=("kernels/quantization/int8_*.py", "cpu/*.c", "cpu/*.h", "cpu/quantised.py", "cpu/linear.py"),
)
