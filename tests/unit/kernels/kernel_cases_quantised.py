"""Products with quantised weights by Triton against their twins: interpreted and on CUDA (``CASES``), and the
launches of real models (``launch_all``).

The rule: against float64, the error is at most twice that of the twin in the same precision; in float32, where the
order of a sum matters, it may be eight units of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_layer_ops import (
    ACTIVATIONS,
    assert_close_enough,
    both,
    gate_exactly,
    random,
)
from tp_engine.kernels.quantization.weights import (
    Codes,
    QuantisedWeight,
    dequantise,
    multiply_quantised,
    values_per_byte,
)
from tp_engine.model_config.mlp import SILU, Activation

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E8M0, UINT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8
Case = Callable[[str], None]


def make_weight(
    kind: Codes,
    shape: Sequence[int],
    device: str = "cpu",
    *,
    group: int = 0,
    scales: torch.dtype = FLOAT32,
    row_block: int = 1,
    zeros: bool = False,
    factors: bool = False,
) -> QuantisedWeight:
    """Random codes, all of them but NaN; weights of about the size that keeps a product's size near one."""
    *outer, columns = shape
    generator = torch.Generator().manual_seed(columns + group)
    codes = torch.randint(0, 256, (*outer, columns // values_per_byte(kind)), generator=generator, dtype=torch.uint8)
    if kind == "e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, codes & 0x80, codes)
    size = {"int4": 0.2, "int8": 0.02, "e4m3": 0.01, "e2m1": 0.3}[kind] * columns**-0.5
    found: dict[str, Any] = {}
    groups = -(-columns // group) if group else 0
    if group:
        values = torch.rand(*outer[:-1], -(-outer[-1] // row_block), groups, generator=generator) + 0.5
        if scales == E8M0:
            found["scales"] = (values * 8 - 10).exp2().to(E8M0)
        else:
            factor = {E4M3: 1.0, UINT8: 150.0}.get(scales, size)
            found["scales"] = (values * factor).to(scales)
    if zeros:
        found["zeros"] = torch.randint(-128, 128, (*outer, groups), generator=generator, dtype=torch.int8)
    if factors:
        found["factors"] = (torch.rand(*outer, generator=generator) + 0.5) * size
    weight = QuantisedWeight(kind=kind, codes=codes, group=group, row_block=row_block, **found)
    return weight.map(lambda one: one.to(device))


def make_stack(kind: Codes, shape: tuple[int, int, int], **options: Any) -> QuantisedWeight:
    """A stack without memory."""
    weight = make_weight(kind, shape[1:], "meta", **options)
    return weight.map(lambda one: one.expand(shape[0], *one.shape).contiguous())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """On a GPU, bit by bit.  The interpreter's products are numpy's, whose order of sums depends on the tile."""
    eps = 0 if found.is_cuda else 8 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps * expected.abs().max().item())


def check(
    device: str,
    num_rows: int,
    dtype: torch.dtype,
    kind: Codes,
    shape: tuple[int, int],
    options: dict[str, Any],
    activation: Activation | None = None,
    has_bias: bool = False,
) -> None:
    """Rows are slices of wider rows; a single row also by the kernel for one row; the weight's values as well."""
    from tp_engine.kernels.quantization.dequantise_triton import dequantise_triton
    from tp_engine.kernels.quantization.linear_triton import quantised_linear_triton
    from tp_engine.kernels.quantization.row_triton import quantised_row_triton, takes_row

    weight = make_weight(kind, shape, device, **options)
    x = random((num_rows, shape[1] + 16), dtype, device)[:, : shape[1]]
    bias = random(shape[:1], dtype, device, 2) if has_bias else None
    exact = F.linear(x.double(), dequantise(weight).double(), None if bias is None else bias.double())
    exact = exact if activation is None else gate_exactly(exact, activation)
    twin = multiply_quantised(x, weight, bias, activation)
    granted = 8 * exact.abs().max().item() if dtype == FLOAT32 else 1e-2
    assert_close_enough(quantised_linear_triton(x, weight, bias, activation), twin, exact, granted)
    if num_rows == 1 and takes_row(weight):
        assert_close_enough(quantised_row_triton(x, weight, bias, activation), twin, exact, granted)
    torch.testing.assert_close(dequantise_triton(weight, dtype), dequantise(weight).to(dtype), rtol=0, atol=0)


def check_batches(device: str, kind: Codes, options: dict[str, Any]) -> None:
    """A row's result is the same in batches of other sizes, whose tiles differ."""
    from tp_engine.kernels.quantization.linear_triton import quantised_linear_triton

    weight, x = make_weight(kind, (40, 160), device, **options), random((90, 160), BFLOAT16, device)
    whole = quantised_linear_triton(x, weight, None)
    for rows in (slice(0, 1), slice(3, 20), slice(30, 60), slice(4, 60)):
        assert_same(quantised_linear_triton(x[rows], weight, None), whole[rows])


def check_product(device: str, kind: Codes, options: dict[str, Any], activation: Activation | None) -> None:
    """The layers' product: one row, few, and so many that the weight is dequantised."""
    from tp_engine.kernels.quantization.linear_candidates import FEW_ROWS
    from tp_engine.layers.quantization.quantised_products import TritonQuantised

    weight, bias = make_weight(kind, (48, 96), device, **options), random((48,), BFLOAT16, device, 2)
    product = TritonQuantised(weight, activation)
    for num_rows in (1, 5, FEW_ROWS + 1):
        x = random((num_rows, 96), BFLOAT16, device)
        exact = F.linear(x.double(), dequantise(weight).double(), bias.double())
        exact = exact if activation is None else gate_exactly(exact, activation)
        twin = multiply_quantised(x, weight, bias, activation)
        # For many rows a library multiplies rounded weights.
        granted = 1e-2 if num_rows <= FEW_ROWS else 2 * exact.abs().max().item()
        assert_close_enough(product(x, bias), twin, exact, granted)
        if activation is not None:
            assert_same(product.before_activation(x, bias), TritonQuantised(weight, None)(x, bias))


def check_parts(device: str) -> None:
    """Few values at a time; the last rows are fewer, and share a scale."""
    from tp_engine.kernels.quantization.dequantise_triton import multiply_dequantised

    weight = make_weight("e4m3", (150, 64), device, group=32, row_block=32)
    x, bias = random((5, 64), FLOAT32, device), random((150,), FLOAT32, device, 1)
    whole = multiply_dequantised(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, dequantise(weight), bias))
    for most_values in (64, 70 * 64):
        torch.testing.assert_close(multiply_dequantised(x, weight, bias, most_values), whole)


def check_rows(device: str, dtype: torch.dtype, size: int, group: int, scale: float | None) -> None:
    """Codes may differ by a step where a quotient lies between two; rows of zeros, NaN, rows of wider rows."""
    quantise, twin = both("quantise_rows")
    x = random((6, size + 16), dtype, device)[:, :size] * 3
    x[2], x[4, 5] = 0, torch.nan
    given = None if scale is None else torch.tensor(scale, device=device)
    (codes, scales), (expected, expected_scales) = quantise(x, group, given), twin(x, group, given)
    assert codes.dtype == expected.dtype and codes.shape == expected.shape and scales.shape == expected_scales.shape
    whole = [0, 1, 2, 3, 5]
    torch.testing.assert_close(scales[whole], expected_scales[whole], rtol=1e-6, atol=0)
    assert torch.equal(scales[4, 1:], expected_scales[4, 1:]) and scales[4, 0].isnan()
    found, wanted = codes[whole].float(), expected[whole].float()
    torch.testing.assert_close(found, wanted, rtol=1 / 7, atol=2**-9)
    assert (found != wanted).float().mean() < 0.01


def check_rows_of_ties(device: str) -> None:
    """Bit by bit: numbers that the inverse of their peak brings half-way between two codes, up to its last bit."""
    quantise, twin = both("quantise_rows")
    halves = torch.arange(17, 32, 2, dtype=torch.float32, device=device)  # between 8, 9, ... 16 eighths
    peaks = torch.arange(300, 364, dtype=torch.float32, device=device)[:, None] / 256
    x = torch.cat((peaks, halves / 448 * peaks * 8, halves / 448 * peaks / 2), 1)
    assert torch.equal(quantise(x)[0].view(torch.uint8), twin(x)[0].view(torch.uint8))


def check_gated_rows(
    device: str, dtype: torch.dtype, size: int, group: int, scale: float | None, activation: Activation
) -> None:
    """Bit by bit the codes of what ``gate`` stores; rows of zeros, NaN, rows of wider rows."""
    (gate, _), (quantise, _) = both("gate"), both("quantise_rows")
    x = random((6, 2 * size + 16), dtype, device)[:, : 2 * size] * 3
    x[2], x[4, size + 5] = 0, torch.nan
    given = None if scale is None else torch.tensor(scale, device=device)
    codes, scales = quantise(x, group, given, activation)
    expected, expected_scales = quantise(gate(x, activation), group, given)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), (codes, expected)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


def check_every_code(device: str, kind: Codes, dtype: torch.dtype) -> None:
    """Rows of an identity give each code's value, exactly; also where a GPU converts e4m3 itself."""
    from tp_engine.kernels.quantization.linear_triton import quantised_linear_triton

    codes = torch.arange(256, dtype=torch.uint8, device=device).reshape(4, 64)
    if kind == "e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, codes & 0x80, codes)
    weight = QuantisedWeight(kind=kind, codes=codes)
    x = torch.eye(weight.shape[1], dtype=dtype, device=device)
    assert torch.equal(quantised_linear_triton(x, weight, None).T.float(), dequantise(weight))


def make_cases() -> dict[str, Case]:
    """Name -> check on a device."""
    cases: dict[str, Case] = {}
    # rows, type of x, codes, (out, in), what the weight has, activation, bias
    blocks = {"group": 128, "row_block": 128}
    listed: list[tuple[Any, ...]] = [
        (1, BFLOAT16, "int4", (24, 256), {"group": 128, "scales": BFLOAT16}),
        (5, FLOAT32, "int4", (24, 320), {"group": 64, "scales": FLOAT16, "zeros": True}, None, True),
        (1, FLOAT32, "int4", (26, 320), {"group": 64, "scales": FLOAT16, "zeros": True}, SILU, True),
        (33, BFLOAT16, "int4", (40, 352), {"group": 32, "scales": UINT8, "zeros": True, "factors": True}),
        (1, BFLOAT16, "int4", (40, 352), {"group": 32, "scales": UINT8, "zeros": True, "factors": True}, SILU),
        (2, FLOAT16, "int4", (40, 176), {"group": 16, "scales": FLOAT16}, SILU),
        (1, FLOAT16, "int4", (40, 176), {"group": 16, "scales": FLOAT16}, SILU),
        (3, FLOAT32, "int4", (9, 100), {"group": 48, "zeros": True}),
        (1, FLOAT32, "int4", (9, 104), {"group": 8}),
        (1, BFLOAT16, "int4", (18, 90), {"group": 90, "scales": BFLOAT16}),
        (1, FLOAT32, "int8", (20, 200), {"group": 200, "zeros": True}, None, True),
        (4, BFLOAT16, "int8", (20, 200), {"group": 64, "zeros": True}, ACTIVATIONS[-1], True),
        (1, FLOAT16, "int8", (20, 250), {"factors": True}),
        (1, FLOAT32, "e4m3", (150, 320), blocks),
        (65, BFLOAT16, "e4m3", (150, 320), blocks, SILU, True),
        (7, FLOAT16, "e4m3", (150, 192), {"group": 64, "row_block": 64}),
        (1, BFLOAT16, "e4m3", (20, 144), {"factors": True}, SILU, True),
        (6, FLOAT32, "e4m3", (20, 144), {"factors": True}),
        (1, BFLOAT16, "e4m3", (40, 352), {"group": 32, "scales": E8M0}, SILU, True),
        (9, FLOAT16, "e4m3", (40, 176), {"group": 16, "scales": E8M0}),
        (1, FLOAT32, "e2m1", (40, 320), {"group": 16, "scales": E4M3, "factors": True}, ACTIVATIONS[-1], True),
        (17, FLOAT16, "e2m1", (40, 336), {"group": 16, "scales": E4M3, "factors": True}, SILU),
        (9, BFLOAT16, "e2m1", (40, 352), {"group": 32, "scales": E8M0}, ACTIVATIONS[2], True),
        (1, BFLOAT16, "e2m1", (40, 352), {"group": 32, "scales": E8M0}, ACTIVATIONS[2], True),
        (3, FLOAT16, "e2m1", (40, 352), {"group": 32, "scales": E8M0}),
        (64, FLOAT32, "e2m1", (40, 180), {"group": 4, "scales": E8M0}),
    ]
    for num_rows, dtype, kind, shape, options, *rest in listed:
        name = f"quantised-{num_rows}-{str(dtype)[6:]}-{kind}-{shape}-{options}-{len(rest)}"
        activation, has_bias = (*rest, None, False)[:2] if len(rest) < 2 else rest
        cases[name] = partial(
            check, num_rows=num_rows, dtype=dtype, kind=kind, shape=shape, options=options,
            activation=activation, has_bias=bool(has_bias),
        )  # fmt: skip
    kinds: tuple[tuple[Codes, dict[str, Any]], ...] = (
        ("int4", {"group": 32, "zeros": True}), ("e4m3", blocks), ("e2m1", {"group": 16, "scales": E4M3}),
    )  # fmt: skip
    for kind, options in kinds:
        cases[f"batches-{kind}"] = partial(check_batches, kind=kind, options=options)
    products: tuple[tuple[Codes, dict[str, Any]], ...] = (
        ("int4", {"group": 32, "scales": BFLOAT16}), ("e4m3", {"group": 32, "row_block": 32}),
    )  # fmt: skip
    for kind, options in products:
        for activation in (None, SILU):
            cases[f"product-{kind}-{activation}"] = partial(
                check_product, kind=kind, options=options, activation=activation
            )
    cases["values-in-parts"] = check_parts
    cases["rows-as-float8-half-way"] = check_rows_of_ties
    for dtype, size, group, scale in (
        (BFLOAT16, 300, 0, None), (FLOAT32, 1500, 128, None), (FLOAT16, 256, 128, None), (BFLOAT16, 40, 0, 0.02),
    ):  # fmt: skip
        cases[f"rows-as-float8-{dtype}-{size}-{group}-{scale}"] = partial(
            check_rows, dtype=dtype, size=size, group=group, scale=scale
        )
        for activation in (SILU, ACTIVATIONS[2], ACTIVATIONS[-1]):
            cases[f"gated-rows-as-float8-{dtype}-{size}-{group}-{scale}-{activation.kind}"] = partial(
                check_gated_rows, dtype=dtype, size=size, group=group, scale=scale, activation=activation
            )
    for code in ("int4", "int8", "e4m3", "e2m1"):
        cases[f"every-code-{code}"] = partial(check_every_code, kind=code, dtype=FLOAT32 if code == "int8" else FLOAT16)
    return cases


CASES = make_cases()


def launch_all(capability: int) -> None:
    """Products of Qwen3-8B in every format, with one row and with more; every tile, with an activation, of one; rows as
    8-bit floats where the GPU has them."""
    from tp_engine.kernels.quantization.dequantise_triton import dequantise_triton
    from tp_engine.kernels.quantization.linear_triton import quantised_linear_triton
    from tp_engine.kernels.quantization.row_triton import quantised_row_triton, takes_row

    formats: tuple[tuple[Codes, dict[str, Any]], ...] = (
        ("int4", {"group": 128, "scales": BFLOAT16}),
        ("int4", {"group": 16, "scales": BFLOAT16, "zeros": True}),
        ("int4", {"group": 32, "scales": UINT8, "zeros": True, "factors": True}),
        ("int8", {"factors": True}),
        ("e4m3", {"group": 128, "row_block": 128}),
        ("e4m3", {"group": 32, "scales": E8M0}),
        ("e2m1", {"group": 32, "scales": E8M0}),
        ("e2m1", {"group": 16, "scales": E4M3, "factors": True}),
    )
    x = torch.empty(128, 4096, dtype=BFLOAT16, device="meta")
    for kind, options in formats:
        weight = make_weight(kind, (4096, 4096), "meta", **options)
        assert takes_row(weight)
        quantised_row_triton(x[:1], weight, None)
        quantised_linear_triton(x[:8], weight, None)
        dequantise_triton(weight, BFLOAT16)
    weight = make_weight("int4", (24576, 4096), "meta", group=128, scales=BFLOAT16)
    quantised_row_triton(x[:1], weight, None, SILU)
    for num_rows in (8, 32, 64, 128):
        quantised_linear_triton(x[:num_rows], weight, None, SILU)
    if capability >= 89:
        quantise_rows, _ = both("quantise_rows")
        for group, scale in ((0, None), (128, None), (0, weight.scales)):
            quantise_rows(x, group, scale)
        for size, group in ((12288, 0), (25600, 0), (25600, 128)):
            quantise_rows(torch.empty(128, 2 * size, dtype=BFLOAT16, device="meta"), group, None, SILU)


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it; numbers too small for a float32's exponent survive."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
    assert ".ftz" not in kernel.asm["ptx"]
