"""Cases of ``bench_kernels``: products with quantised weights, beside the same products in the model's type, and norms
whose rows become 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import KernelCase, Launch, Shape, can_use
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, values_per_byte

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
    """The product of ``num_rows`` rows with the weight of gate and up in every format, and with a plain one.  Bytes are
    those of codes, scales, rows and results."""
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
    if num_rows > _FEW_ROWS and can_use(torch.float8_e4m3fn, shape.device):
        for group in (0, min(128, shape.hidden)):
            yield from _norm_cases(shape, num_rows, group)


def _norm_cases(shape: Shape, num_rows: int, group: int) -> Iterator[KernelCase]:
    """The residual's sum, its norm, and codes with scales of ``group`` columns: by two kernels, and by one.  Bytes are
    those that one kernel needs, so the shares compare the times: the rows and the residual (in), the sum, the codes and
    their scales (out), the weight."""
    element, scales = shape.dtype.itemsize, 4 * (shape.hidden // group if group else 1)
    num_bytes = num_rows * (3 * shape.hidden * element + shape.hidden + scales) + shape.hidden * element
    kind = "fp8 in groups" if group else "fp8 per row"
    for name, is_fused in ((f"add_rms_norm, then {kind}", False), (f"add_rms_norm as {kind}", True)):
        yield KernelCase(
            kernel=name,
            size=f"{num_rows} rows",
            num_bytes=num_bytes,
            make=partial(_norm_launch, shape, num_rows, group, is_fused),
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
    from tp_engine.kernels.quantization.scaled_products import has_fp8_units, scaled_product
    from tp_engine.layers.quantization.quantised_products import TritonQuantised

    weight = make_weight(name, (2 * shape.inner, shape.hidden), shape.device)
    product = TritonQuantised(weight, None, scaled_product(weight) if has_fp8_units(weight.codes.device) else None)
    x = torch.randn(num_rows, shape.hidden, device=shape.device).to(shape.dtype)
    return lambda: product(x, None)


def _plain_launch(shape: Shape, num_rows: int) -> Launch:
    weight = torch.randn(2 * shape.inner, shape.hidden, device=shape.device).to(shape.dtype)
    x = torch.randn(num_rows, shape.hidden, device=shape.device).to(shape.dtype)
    return lambda: F.linear(x, weight)


def _norm_launch(shape: Shape, num_rows: int, group: int, is_fused: bool) -> Launch:
    from tp_engine.kernels.layer_ops import NormRule
    from tp_engine.kernels.ops import op
    from tp_engine.kernels.quantization.row_codes import CodeRule

    norm_codes, add_norm, quantise = (op(name, shape.device) for name in ("norm_codes", "add_norm", "quantise_rows"))
    x, residual = (torch.randn(num_rows, shape.hidden, device=shape.device).to(shape.dtype) for _ in range(2))
    rule, wanted = NormRule(torch.ones(shape.hidden, device=shape.device, dtype=shape.dtype), 1e-6), CodeRule(group)
    if is_fused:
        return lambda: norm_codes(x, residual, rule, wanted)
    return lambda: quantise(add_norm(x, residual, rule), group)
