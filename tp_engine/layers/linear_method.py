"""How ``x @ weight.T + bias`` is computed on a CPU, by the weight's type and the number of rows of ``x``.

==========  ==================================  =================================  ======================
type        processor                           few rows                           more rows
==========  ==================================  =================================  ======================
float32     any                                 C, up to ``max_float32_rows``      oneDNN, packed weight
bfloat16    with instructions for matrices of   oneDNN, packed weight              the same
            it (AMX; ARM)
16 bits     otherwise                           C                                  C
==========  ==================================  =================================  ======================

The bounds are fixed: they follow from times measured side by side (``scripts/bench_linear.py``, docs/benchmarks.md),
not from times taken at each start, so that a model's tokens are the same in every run on a machine.  C reads the plain
weight, which costs nothing, and which a tied embedding may share.  oneDNN wants it in its own blocked order: a float32
weight that meets many rows is therefore kept twice.  A vocabulary's is not, as it meets few rows: beyond the bound it
is multiplied by ``F.linear``.

oneDNN's functions belong to torch's private interface, so they are probed, and their result is compared before it is
trusted.  What is missing, C or oneDNN, the other one does, or ``F.linear``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

import torch
import torch.nn.functional as F

from tp_engine.kernels.native.layout import DTYPE_CODES
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.native.linear import few_rows_linear

PACKED_DTYPES = (torch.float32, torch.bfloat16)

# In float32, C is ahead of oneDNN up to 16 rows.  At 64 it takes up to a quarter longer, which for a small weight is
# less than what a tape saves, and a tape holds C alone.
MAX_FLOAT32_ROWS = 16
MAX_SMALL_FLOAT32_ROWS = 64
SMALL_FLOAT32_ELEMENTS = 1 << 20

# A float32 product of one row with a weight this small is faster by F.linear than by oneDNN.
SMALL_WEIGHT_ELEMENTS = 1 << 19


class LinearMethod(Protocol):
    """A weight of shape (out, in), ready to be applied.  ``needs_weight``: whether it still reads the original.

    Up to ``native_rows`` rows, C does it, so that a tape can hold it.
    """

    needs_weight: bool
    native_rows: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out), in the type of ``x``."""


class PlainLinear:
    """``F.linear``."""

    needs_weight = True
    native_rows = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


class NativeLinear:
    """C, which is made for few rows."""

    needs_weight = True
    native_rows = sys.maxsize

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor) -> None:
        self._library, self._weight = library, weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return few_rows_linear(self._library, x, self._weight, bias)


class PackedLinear:
    """oneDNN with the weight in its own blocked order."""

    needs_weight = False
    native_rows = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return packed


class LinearByRows:
    """One method for up to ``max_few`` rows, another for more."""

    def __init__(self, few: LinearMethod, many: LinearMethod, max_few: int) -> None:
        self._few, self._many, self._max_few = few, many, max_few
        self.needs_weight = few.needs_weight or many.needs_weight
        self.native_rows = min(max_few, few.native_rows)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return (self._few if x.shape[0] <= self._max_few else self._many)(x, bias)


_trusted: dict[tuple[torch.dtype, torch.Size], bool] = {}


def choose_linear_method(weight: torch.Tensor, *, meets_many_rows: bool = True) -> LinearMethod:
    """The fastest method that is known to work for this weight.  Called once its values are final."""
    if weight.device.type != "cpu":
        return PlainLinear(weight)
    library = native_library()
    if library is None or weight.dtype not in DTYPE_CODES or not weight.is_contiguous():
        return _without_native(weight)
    native = NativeLinear(library, weight)
    if weight.dtype == torch.float32:
        many = _packed(weight) if meets_many_rows else None
        return LinearByRows(native, many or PlainLinear(weight), max_float32_rows(weight))
    if weight.dtype == torch.bfloat16 and library.has_bfloat16_matrices():
        return _packed(weight) or native
    return native


def max_float32_rows(weight: torch.Tensor) -> int:
    """Up to how many rows C multiplies a float32 weight."""
    return MAX_SMALL_FLOAT32_ROWS if weight.numel() <= SMALL_FLOAT32_ELEMENTS else MAX_FLOAT32_ROWS


def _without_native(weight: torch.Tensor) -> LinearMethod:
    packed = _packed(weight)
    if packed is None:
        return PlainLinear(weight)
    if weight.dtype == torch.float32 and weight.numel() <= SMALL_WEIGHT_ELEMENTS:
        return LinearByRows(PlainLinear(weight), packed, 1)
    return packed


def _packed(weight: torch.Tensor) -> PackedLinear | None:
    """oneDNN's method, unless it is missing or wrong."""
    if weight.dtype not in PACKED_DTYPES:
        return None
    try:
        packed = PackedLinear(weight)
        key = (weight.dtype, weight.shape)
        if key not in _trusted:
            _trusted[key] = _agrees(packed, weight)
    except (AttributeError, RuntimeError):
        return None
    return packed if _trusted[key] else None


def _agrees(packed: PackedLinear, weight: torch.Tensor) -> bool:
    """Whether the packed product equals the plain one to within rounding, with a bias, for two rows."""
    out_size, in_size = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, in_size, generator=generator).to(weight.dtype)
    bias = torch.randn(out_size, generator=generator).to(weight.dtype)
    expected = F.linear(x, weight, bias)
    found = packed(x, bias)
    scale = expected.abs().max().item() + 1.0
    return (found - expected).abs().max().item() <= 8 * torch.finfo(weight.dtype).eps * scale
