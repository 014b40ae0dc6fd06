"""Cases of ``bench_kernels``: products with quantised weights, beside the same products in the model's type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import KernelCase, Launch, Shape
from tp_engine.kernels.quantised import Codes, QuantisedWeight, values_per_byte

_FEW_ROWS = 64  # up to here the weight's bytes limit a product, beyond it arithmetic

# Name -> codes, columns and rows of a scale, its type; without groups there is a factor per row.
FORMATS: dict[str, tuple[Codes, int, int, torch.dtype]] = {
    "int4, group 128": ("int4", 128, 1, torch.bfloat16),
    "int4, group 32": ("int4", 32, 1, torch.bfloat16),
    "fp8 per row": ("e4m3", 0, 1, torch.float32),
    "fp8 in blocks": ("e4m3", 128, 128, torch.float32),
    "mxfp4": ("e2m1", 32, 1, torch.float8_e8m0fnu),
    "nvfp4": ("e2m1", 16, 1, torch.float8_e4m3fn),
}


def quantised_cases(shape: Shape, num_rows: int) -> Iterator[KernelCase]:
    """The product of ``num_rows`` rows with the weight of gate and up in every format, and with a plain one.

    Bytes are those of codes, scales, rows and results.
    """
    num_in, num_out = shape.hidden, 2 * shape.inner
    around = num_rows * (num_in + num_out) * shape.dtype.itemsize
    size, num_flops = f"{num_rows} rows", 2 * num_rows * num_in * num_out if num_rows > _FEW_ROWS else 0
    yield KernelCase(
        kernel="quantised: none",
        size=size,
        num_bytes=num_in * num_out * shape.dtype.itemsize + around,
        make=partial(_plain_launch, shape, num_rows),
        num_flops=num_flops,
    )
    for name in FORMATS:
        yield KernelCase(
            kernel=f"quantised: {name}",
            size=size,
            num_bytes=make_weight(name, (num_out, num_in), "meta").num_bytes + around,
            make=partial(_launch, shape, num_rows, name),
            num_flops=num_flops,
        )


def make_weight(name: str, sizes: Sequence[int], device: str) -> QuantisedWeight:
    """A weight, or a stack, of ``sizes`` in a format of ``FORMATS``: codes without NaN, equal scales."""
    kind, group, row_block, scales = FORMATS[name]
    *outer, num_out, num_in = sizes
    codes = torch.randint(0x38, (*outer, num_out, num_in // values_per_byte(kind)), dtype=torch.uint8, device=device)
    if not group:
        return QuantisedWeight(kind=kind, codes=codes, factors=torch.full((*outer, num_out), 0.02, device=device))
    groups = torch.full((*outer, -(-num_out // row_block), -(-num_in // group)), 2**-6, device=device)
    return QuantisedWeight(kind=kind, codes=codes, scales=groups.to(scales), group=group, row_block=row_block)


def _launch(shape: Shape, num_rows: int, name: str) -> Launch:
    from tp_engine.kernels.scaled_products import has_fp8_units, scaled_product
    from tp_engine.layers.formats.quantised_products import TritonQuantised

    weight = make_weight(name, (2 * shape.inner, shape.hidden), shape.device)
    product = TritonQuantised(weight, None, scaled_product(weight) if has_fp8_units(weight.codes.device) else None)
    x = torch.randn(num_rows, shape.hidden, device=shape.device).to(shape.dtype)
    return lambda: product(x, None)


def _plain_launch(shape: Shape, num_rows: int) -> Launch:
    weight = torch.randn(2 * shape.inner, shape.hidden, device=shape.device).to(shape.dtype)
    x = torch.randn(num_rows, shape.hidden, device=shape.device).to(shape.dtype)
    return lambda: F.linear(x, weight)
