"""Products with quantised weights on a GPU, by the number of rows: one of Triton's tiles, or a library's product.

::

    row            one row: codes widened in registers, no matrix units               row_triton
    tiles-MxFxN    M rows by F outputs (of few) or N (of many); codes widened, too    linear_triton
    dequantise     Triton makes the values, PyTorch's library the product             dequantise_triton

The code's own choice has one table of tiles for all models and GPUs, so tuning gains most here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tp_engine.kernels.candidates import (
    MANY,
    Candidate,
    Choice,
    Inputs,
    Operation,
    Run,
    Shape,
    integers,
    normal,
    why_no_triton,
)
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.ops import has_triton, op
from tp_engine.kernels.quantization.weights import (
    Codes,
    QuantisedWeight,
    dequantise,
    values_per_byte,
)
from tp_engine.model_config.mlp import SILU, Activation
from tp_engine.system.units import ceil_div

NAME = "quantised_linear"
# The most rows whose codes are widened in registers, by the code's own choice.
FEW_ROWS = 128
# Rows of a tile, its outputs for weights with few and with many of them, warps, stages; the least and the most rows
# for which it is worth a trial.  These four are the code's own choice for up to 16, 32, 64 and 128 rows.
_TILES = (
    ((16, 32, 64, 4, 4), 1, 64),
    ((32, 32, 64, 4, 4), 1, 256),
    ((64, 64, 64, 4, 3), 17, MANY),
    ((128, 64, 64, 8, 3), 33, MANY),
)
_MORE_TILES = (
    ((16, 64, 128, 4, 3), 1, 64),
    ((32, 64, 64, 8, 3), 1, 256),
    ((64, 64, 64, 8, 3), 17, MANY),
    ((128, 32, 32, 8, 3), 33, MANY),
)
_OWN_ROWS = (16, 32, 64, FEW_ROWS)


def shape_of(weight: QuantisedWeight, dtype: torch.dtype, activation: Activation | None) -> Shape:
    """The shape of products with ``weight`` (out, in), of rows of ``dtype``."""
    num_outputs, size = weight.shape
    scales = weight.scales
    return {
        "in": size, "out": num_outputs, "type": _name(dtype), "codes": weight.kind,
        "scales": "none" if scales is None else _name(scales.dtype), "group": 0 if scales is None else weight.group,
        "row_block": weight.row_block, "zeros": int(weight.zeros is not None),
        "factors": int(weight.factors is not None), "parts": 0 if activation is None else activation.num_parts,
    }  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tiles_name(tiles: tuple[int, ...]) -> str:
    rows, few, many, warps, stages = tiles
    return f"tiles-{rows}x{few}x{many}-w{warps}-s{stages}"


def _weights(shape: Shape, device: torch.device, generator: torch.Generator) -> QuantisedWeight:
    """Codes of all values but the two NaN of e4m3, and scales that give outputs about as large as the rows."""
    kind, size = _codes(shape), int(shape["in"])
    out = int(shape["out"])
    codes = integers(0, 256, (out, size // values_per_byte(kind)), torch.uint8, device, generator)
    if kind == "e4m3":
        codes = codes.masked_fill_(codes & 0x7F == 0x7F, 0)
    largest = {"int4": 4.0, "int8": 64.0, "e4m3": 64.0, "e2m1": 3.0}[kind] * size**0.5
    scales = zeros = factors = None
    groups = ceil_div(size, int(shape["group"]) or size)
    if shape["scales"] != "none":
        rows = ceil_div(out, int(shape["row_block"]))
        scales = _scales(str(shape["scales"]), (rows, groups), largest, device, generator)
    if shape["zeros"]:
        zeros = integers(-8, 8, (out, groups), torch.int8, device, generator)
    if shape["factors"]:
        factor = {"none": 1 / largest, "uint8": 1 / (128 * largest)}.get(str(shape["scales"]), 1.0)
        factors = torch.full((out,), factor, dtype=torch.float32, device=device)
    return QuantisedWeight(
        kind=kind, codes=codes, scales=scales, group=int(shape["group"]), row_block=int(shape["row_block"]),
        zeros=zeros, factors=factors,
    )  # fmt: skip


def _scales(
    name: str, size: tuple[int, int], largest: float, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    if name in ("uint8", "float8_e8m0fnu"):
        # Numbers, or exponents around 2^-7.
        low, high = (100, 156) if name == "uint8" else (118, 123)
        found = integers(low, high, size, torch.uint8, device, generator)
        return found if name == "uint8" else found.view(torch.float8_e8m0fnu)
    steps = integers(16, 49, size, torch.uint8, device, generator).float() / 32
    return (steps * (8 / largest if name == "float8_e4m3fn" else 1 / largest)).to(getattr(torch, name))


def _codes(shape: Shape) -> Codes:
    kinds: tuple[Codes, ...] = ("int4", "int8", "e4m3", "e2m1")
    return next(kind for kind in kinds if kind == shape["codes"])


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    dtype = getattr(torch, str(shape["type"]))
    rows = normal((num_rows, int(shape["in"])), device, generator).to(dtype)
    bias = normal((int(shape["out"]),), device, generator).to(dtype)
    activation = {0: None, 1: Activation("relu2"), 2: SILU}[int(shape["parts"])]
    return rows, bias, activation


def _twin(weight: QuantisedWeight, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin rounds values to the type of rows, as the library's product takes them; so may candidates."""
    (x, bias, activation), values = inputs, dequantise(weight)
    exact = F.linear(x.double(), values.double(), bias.double())
    twin = F.linear(x, values.to(x.dtype), bias)
    return (exact, twin) if activation is None else (gate(exact, activation), gate(twin, activation))


def _tiled(tiles: tuple[int, ...], weight: QuantisedWeight, shape: Shape) -> Run:
    from tp_engine.kernels.quantization.linear_triton import RowTiles, quantised_linear_triton

    return partial(_with_tiles, quantised_linear_triton, RowTiles(*tiles), weight)


def _with_tiles(
    multiply: Callable[..., torch.Tensor],
    tiles: Any,
    weight: QuantisedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
) -> torch.Tensor:
    return multiply(x, weight, bias, activation, tiles)


def _of_row(weight: QuantisedWeight, shape: Shape) -> Run:
    from tp_engine.kernels.quantization.row_triton import quantised_row_triton

    return lambda x, bias, activation: quantised_row_triton(x, weight, bias, activation)


def _dequantised(weight: QuantisedWeight, shape: Shape) -> Run:
    from tp_engine.kernels.quantization.dequantise_triton import multiply_dequantised

    activate = op("gate", weight.codes.device.type)

    def run(x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        out = multiply_dequantised(x, weight, bias)
        return out if activation is None else activate(out, activation)

    return run


def _takes_row(shape: Shape) -> bool:
    from tp_engine.kernels.quantization.row_triton import takes_row

    return takes_row(_weights(shape, torch.device("meta"), torch.Generator()))


def _why_no_row(shape: Shape, device: torch.device) -> str | None:
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    return None if _takes_row(shape) else "its rows are not whole words with one scale each"


def _default(shape: Shape, device: torch.device) -> Choice:
    of_one = ((1, "row"),) if has_triton() and _takes_row(shape) else ()
    of_few = tuple((rows, _tiles_name(tiles)) for rows, (tiles, _, _) in zip(_OWN_ROWS, _TILES, strict=True))
    return (*of_one, *of_few, (MANY, "dequantise"))


OPERATION = Operation(
    candidates=(
        Candidate(name="row", build=_of_row, why_not=_why_no_row, most_rows=1),
        *(
            Candidate(
                name=_tiles_name(tiles), build=partial(_tiled, tiles), why_not=why_no_triton, least_rows=least,
                most_rows=most, is_quick=is_quick,
            )
            for some, is_quick in ((_TILES, True), (_MORE_TILES, False))
            for tiles, least, most in some
        ),
        Candidate(name="dequantise", build=_dequantised, why_not=why_no_triton),
    ),
    default=_default,
    weights=_weights,
    inputs=_inputs,
    twin=_twin,
    num_bytes=lambda shape: int(shape["in"]) * int(shape["out"]) // values_per_byte(_codes(shape)),
    sources=("kernels/quantization/*.py", "kernels/elementwise_triton.py", "kernels/dependent_launch_triton.py"),
    copy=lambda weight: weight.map(torch.clone),
)  # fmt: skip
