"""Rows in blocks and their products with weights in blocks by Triton against their twins: interpreted and on CUDA
(``CASES``), and the launches of real models (``launch_all``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_layer_ops import Case, assert_close_enough, both, gate_exactly, random
from tests.unit.kernels.kernel_cases_quantised import BFLOAT16, FLOAT16, FLOAT32, assert_same, make_weight
from tests.unit.kernels.kernel_harness import spilled_bytes
from tp_engine.kernels.experts.experts import ExpertWeights, mix_experts
from tp_engine.kernels.experts.experts_candidates import BLOCK_TILES as EXPERT_TILES
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS, rounded_rows
from tp_engine.kernels.quantization.linear_candidates import BLOCK_TILES
from tp_engine.kernels.quantization.weights import QuantisedWeight, RowBlocks, dequantise, multiply_quantised
from tp_engine.model_config.mlp import SILU
from tp_engine.model_config.quantization import Blocks

# The instructions with scales of each generation of GPUs; MXFP4's has its own name on 10.x.
UNITS = {100: r"tcgen05\.mma\.\S*block_scale", 120: r"mma\.sync\.\S*block_scale"}


def scale_of(kind: Blocks, device: str) -> torch.Tensor | None:
    """The scale of all rows, which NVFP4 has: numbers above 2 are beyond the largest scale of a group."""
    return torch.tensor(2 / (6 * 448), device=device) if kind == "nvfp4" else None


def weight_in_blocks(kind: Blocks, size: tuple[int, int], device: str) -> QuantisedWeight:
    """Random codes; NVFP4's rows have factors."""
    form = BLOCK_FORMATS[kind]
    weight = make_weight(
        form.codes, size, device, group=form.group, scales=form.scale_type, factors=form.scales == "e4m3"
    )
    return QuantisedWeight(
        kind=weight.kind, codes=weight.codes, scales=weight.scales, group=weight.group, factors=weight.factors,
        rows=RowBlocks(kind, scale_of(kind, device)),
    )  # fmt: skip


def tiles_for(num_rows: int) -> list[Any]:
    """The candidates' tiles for so many rows."""
    from tp_engine.kernels.quantization.linear_triton import RowTiles

    return [RowTiles(*tiles) for tiles, least in BLOCK_TILES if num_rows >= least]


def check_rows(device: str, kind: Blocks, dtype: torch.dtype, size: int) -> None:
    """Bit by bit: numbers of all sizes, ties between two codes, zeros, numbers too small for a scale, NaN, infinities;
    rows of wider rows."""
    (encode, encode_twin), (round_rows, twin) = both("encode_rows"), both("round_rows")
    x = random((9, size + 16), FLOAT32, device)[:, :size]
    x = x * (random((9, size), FLOAT32, device, 1) * 3).exp()
    halves = torch.arange(-32, size - 32, device=device) / 8  # between codes, if the largest makes the scale 1
    x[1], x[2], x[3], x[4, 5], x[5, 20], x[6] = halves, 0, x[3] * 1e-7, torch.nan, -torch.inf, halves * 2**-20
    x = x.to(dtype)
    given = scale_of(kind, device)
    (codes, scales), (expected, expected_scales) = encode(x, kind, given), encode_twin(x, kind, given)
    assert torch.equal(scales, expected_scales) and torch.equal(codes, expected)
    torch.testing.assert_close(round_rows(x, kind, given), twin(x, kind, given), rtol=0, atol=0, equal_nan=True)
    group = BLOCK_FORMATS[kind].group
    assert twin(x, kind, given)[4:6].isnan().sum() == 2 * group and not twin(x, kind, given)[[0, 1, 2, 3]].isnan().any()


def check_rows_of_experts(device: str, dtype: torch.dtype) -> None:
    """Bit by bit: each row three times, by the scales of three experts; slices of wider rows."""
    (encode, encode_twin), (round_rows, twin) = both("encode_rows"), both("round_rows")
    x, scales = random((5, 112), dtype, device)[:, :96], random((15,), FLOAT32, device, 1).abs() / 1000
    for found, expected in zip(encode(x, "nvfp4", scales), encode_twin(x, "nvfp4", scales), strict=True):
        assert torch.equal(found, expected) and len(found) == 15
    assert torch.equal(round_rows(x, "nvfp4", scales), twin(x, "nvfp4", scales))
    assert round_rows(x[:0], "nvfp4", scales[:0]).shape == (0, 96)


def experts_in_blocks(kind: Blocks, size: tuple[int, int, int], device: str) -> ExpertWeights[QuantisedWeight]:
    """Experts from the second on, each with its own scales of both products' rows."""
    num_experts, hidden, inner = size

    def stack(rows: int, columns: int, seed: int) -> QuantisedWeight:
        own = [weight_in_blocks(kind, (rows, columns), device) for _ in range(num_experts)]
        joined: dict[str, Any] = {
            name: None if getattr(own[0], name) is None else torch.stack([getattr(one, name) for one in own])
            for name in ("codes", "scales", "factors")
        }
        scale, numbers = scale_of(kind, device), torch.arange(seed, seed + num_experts, device=device)
        rule = RowBlocks(kind, None if scale is None else scale * (1 + numbers / 2))
        return replace(own[0], **joined, rows=rule)

    return ExpertWeights(
        gate_up=stack(2 * inner, hidden, 0), down=stack(hidden, inner, 2), gate_up_bias=None, down_bias=None, first=1,
        activation=SILU,
    )  # fmt: skip


def check_experts(device: str, kind: Blocks) -> None:
    """Against the twin in float64; the last row alone gives the same.  What the activation gives was added up in
    another order, so a few groups have other codes; most rows have none of these."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    weights, x = experts_in_blocks(kind, (4, 96, 64), device), random((41, 96), BFLOAT16, device)
    ids = random((41, 6), FLOAT32, device, 4).topk(3).indices.to(torch.int32)
    shares = random((41, 3), FLOAT32, device, 5).sigmoid()
    exact, twin = (mix_experts(rows, ids, shares, weights) for rows in (x.double(), x))
    for product in (TritonExperts(weights), *in_units(weights, device)):
        found = product(x, ids, shares)
        errors = [((one.double() - exact).norm(dim=1) / exact.norm(dim=1)).median().item() for one in (found, twin)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(BFLOAT16).eps, errors
        assert_same(product(x[-1:], ids[-1:], shares[-1:]), found[-1:])


def in_units(weights: ExpertWeights[QuantisedWeight], device: str) -> list[Any]:
    """The candidates that multiply codes with codes, where the GPU has units, or in the interpreter."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    has_units = device != "cuda" or torch.cuda.get_device_capability()[0] in (10, 12)
    return [TritonExperts(weights, tiles, in_blocks=True) for tiles in EXPERT_TILES] if has_units else []


def check_product(device: str, kind: Blocks, num_rows: int, size: tuple[int, int]) -> None:
    """Against float64 of the same rounded rows: no further from it than plain PyTorch in bfloat16."""
    from tp_engine.kernels.quantization.block_linear_triton import BlockScaledProduct

    weight, x = weight_in_blocks(kind, size, device), random((num_rows, size[1]), BFLOAT16, device)
    bias, rows = random(size[:1], BFLOAT16, device, 2), weight.rows
    assert rows is not None
    rounded = rounded_rows(x, kind, rows.scale)
    exact = F.linear(rounded.double(), dequantise(weight).double(), bias.double())
    twin = F.linear(rounded.to(BFLOAT16), dequantise(weight).to(BFLOAT16), bias)
    for tiles in tiles_for(num_rows):
        assert_close_enough(BlockScaledProduct(weight, tiles)(x, bias), twin, exact)


def check_layer(device: str, kind: Blocks) -> None:
    """A layer's product rounds rows before it multiplies, by the kernels that its number of rows has."""
    from tp_engine.layers.quantization.quantised_products import TritonQuantised

    weight = weight_in_blocks(kind, (48, 96), device)
    product, bias, rows = TritonQuantised(weight, SILU), random((48,), BFLOAT16, device, 2), weight.rows
    assert rows is not None
    for num_rows in (1, 5):
        x = random((num_rows, 96), BFLOAT16, device)
        rounded = rounded_rows(x, kind, rows.scale)
        exact = gate_exactly(F.linear(rounded.double(), dequantise(weight).double(), bias.double()), SILU)
        twin = multiply_quantised(rounded.to(BFLOAT16), weight, bias, SILU)
        # NVFP4's values are rounded to the type of rows as well, by half a unit each.
        assert_close_enough(product(x, bias), twin, exact, exact.abs().max().item())


def make_cases() -> dict[str, Case]:
    """Name -> check on a device; products only where the GPU has units, or in the interpreter."""
    cases: dict[str, Case] = {}
    for kind in BLOCK_FORMATS:
        for dtype, size in ((FLOAT32, 90), (BFLOAT16, 352), (FLOAT16, 64)):
            cases[f"rows-{kind}-{dtype}-{size}"] = partial(check_rows, kind=kind, dtype=dtype, size=size)
        cases[f"layer-{kind}"] = partial(check_layer, kind=kind)
        cases[f"experts-{kind}"] = partial(check_experts, kind=kind)
        for num_rows, shape in ((3, (40, 352)), (19, (130, 90))):
            cases[f"product-{kind}-{num_rows}-{shape}"] = partial(
                _where_units_are, partial(check_product, kind=kind, num_rows=num_rows, size=shape)
            )
    for dtype in (FLOAT32, BFLOAT16):
        cases[f"rows-of-experts-{dtype}"] = partial(check_rows_of_experts, dtype=dtype)
    return cases


def _where_units_are(check: Case, device: str) -> None:
    if device == "cpu" or torch.cuda.get_device_capability()[0] in (10, 12):
        check(device)


CASES = make_cases()


def launch_all(capability: int) -> None:
    """Rows and products of Qwen3-8B; units other than those with scales widen MXFP4 alone, which nothing uses."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts
    from tp_engine.kernels.quantization.block_linear_triton import BlockScaledProduct

    x = torch.empty(128, 4096, dtype=BFLOAT16, device="meta")
    encode, round_rows = both("encode_rows")[0], both("round_rows")[0]
    for kind in BLOCK_FORMATS:
        scale = scale_of(kind, "meta")
        encode(x, kind, scale)
        round_rows(x, kind, scale)
        if scale is not None:
            encode(x, kind, scale.expand(8 * len(x)))
            round_rows(x, kind, scale.expand(8 * len(x)))
        if capability >= 100 or kind == "mxfp4":
            weight = weight_in_blocks(kind, (4096, 4096), "meta")
            for num_rows in (8, 64, 128) if capability >= 100 else (8,):
                for tiles in tiles_for(num_rows)[-1:]:
                    BlockScaledProduct(weight, tiles)(x[:num_rows], None)
            experts = experts_in_blocks(kind, (8, 4096, 768), "meta")
            ids, shares = (torch.empty(128, 4, dtype=one, device="meta") for one in (torch.int32, FLOAT32))
            for tiles in EXPERT_TILES if capability >= 100 else EXPERT_TILES[:1]:
                TritonExperts(experts, tiles, in_blocks=True)(x, ids, shares)


def check_compiled(kernel: Any, capability: int) -> None:
    """Products meet units that take scales, and spill nothing where these read registers, on sm_120; numbers too small
    for a float32's exponent survive."""
    ptx = kernel.asm["ptx"]
    assert ".ftz" not in ptx
    if kernel.name in ("block_linear_kernel", "grouped_block_kernel") and capability >= 100:
        assert re.search(UNITS[capability], ptx), f"{kernel.name} widens its codes on sm_{capability}"
    if capability == 120:
        assert spilled_bytes(kernel) == 0, kernel.name
