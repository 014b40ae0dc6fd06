"""Products with quantised weights on a GPU, by the number of rows: one of Triton's tiles, or a library's product.

::

    row            one row: codes widened in registers, no matrix units               row_triton
    tiles-MxFxN    M rows by F outputs (of few) or N (of many); codes widened, too    linear_triton
    dequantise     Triton makes the values, PyTorch's library the product             dequantise_triton
    codes-MxFxN    rows become 8-bit floats, which meet the weight's in units of      linear_triton
    library-codes  their own: Triton's tiles, or PyTorch's library                    scaled_products
    mx-MxFxN       Triton's dot_scaled widens MXFP4                                   linear_triton
    blocks-MxFxN   rows in blocks meet weights in blocks, in units for both           block_linear_triton

The code's own choice has one table of tiles for all models and GPUs, so tuning gains most here.  Rows become codes only
if the checkpoint's makers rounded them so (``rows`` of a shape); results differ by that rounding, so such a candidate
has a twin of its own, which rounds as it does.  Rows in blocks (``weight.rows``) are asked for: all candidates round
them, and so does their one twin.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

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
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS, has_blocks
from tp_engine.kernels.quantization.block_rows import rounded_rows as rows_in_blocks
from tp_engine.kernels.quantization.row_codes import (
    PRODUCT_DTYPE,
    Rows,
    rounded_rows,
    rule_for,
    takes_codes,
)
from tp_engine.kernels.quantization.scaled_products import (
    ScaledProduct,
    has_fp8_units,
    has_scaled_product,
    scaled_product,
)
from tp_engine.kernels.quantization.weights import (
    Codes,
    QuantisedWeight,
    RowBlocks,
    dequantise,
    values_per_byte,
)
from tp_engine.model_config.mlp import SILU, Activation
from tp_engine.system.units import ceil_div

NAME = "quantised_linear"
TileSizes: TypeAlias = tuple[int, int, int, int, int]
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
_MX_TILES = (((16, 64, 64, 4, 4), 1), ((64, 128, 128, 8, 3), 17))
_CODE_TILES = (((16, 64, 64, 4, 4), 1), ((64, 128, 128, 8, 4), 17), ((128, 64, 64, 8, 3), 65))
BLOCK_TILES = (((16, 128, 128, 4, 3), 1), ((64, 128, 128, 4, 3), 17), ((128, 128, 128, 8, 3), 65))
_BLOCK_CAPABILITIES = (10, 12)  # major ones, whose units multiply blocks
# The most rows whose codes are widened in registers where the library has a product of codes, by the code's own choice.
FEW_ROWS_BESIDE_CODES = 64
_SMALL = 256  # of a weight that stands for others of its format


def shape_of(
    weight: QuantisedWeight, dtype: torch.dtype, activation: Activation | None, *, rounds_rows: bool = False
) -> Shape:
    """The shape of products by ``weight`` (out, in) with rows of ``dtype``.

    ``rounds_rows``: they may be rounded to 8 bits.
    """
    num_outputs, size = weight.shape
    return {
        "in": size, "out": num_outputs, "type": name_of(dtype), **format_of(weight),
        "parts": 0 if activation is None else activation.num_parts,
        "rows": rows_of(dtype, rounds_rows=rounds_rows) if weight.rows is None else weight.rows.kind,
    }  # fmt: skip


def format_of(weight: QuantisedWeight) -> dict[str, int | str]:
    """How ``weight`` is quantised, as a part of a shape."""
    scales = weight.scales
    return {
        "codes": weight.kind, "scales": "none" if scales is None else name_of(scales.dtype),
        "group": 0 if scales is None else weight.group, "row_block": weight.row_block,
        "zeros": int(weight.zeros is not None), "factors": int(weight.factors is not None),
    }  # fmt: skip


def rows_of(dtype: torch.dtype, *, rounds_rows: bool) -> str:
    """How rows of ``dtype`` may be read: products of codes give bfloat16."""
    return "e4m3" if rounds_rows and dtype == PRODUCT_DTYPE else "whole"


def name_of(dtype: torch.dtype) -> str:
    """The name of a type in shapes."""
    return str(dtype).removeprefix("torch.")


def _tiles_name(tiles: TileSizes, by: str = "tiles") -> str:
    rows, few, many, warps, stages = tiles
    return f"{by}-{rows}x{few}x{many}-w{warps}-s{stages}"


def _weights(shape: Shape, device: torch.device, generator: torch.Generator) -> QuantisedWeight:
    return random_quantised(shape, (int(shape["out"]), int(shape["in"])), device, generator)


def random_quantised(
    shape: Shape, sizes: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> QuantisedWeight:
    """A weight, or a stack, of ``sizes`` in the format of ``shape``: codes of all values, but for the two NaN of
    e4m3, and scales that give outputs of the size of the rows."""
    *outer, out, size = sizes
    kind = _codes(shape)
    codes = integers(0, 256, (*outer, out, size // values_per_byte(kind)), torch.uint8, device, generator)
    if kind == "e4m3":
        codes = codes.masked_fill_(codes & 0x7F == 0x7F, 0)
    largest = {"int4": 4.0, "int8": 64.0, "e4m3": 64.0, "e2m1": 3.0}[kind] * size**0.5
    scales = zeros = factors = None
    groups = ceil_div(size, int(shape["group"]) or size)
    if shape["scales"] != "none":
        rows = ceil_div(out, int(shape["row_block"]))
        scales = _scales(str(shape["scales"]), (*outer, rows, groups), largest, device, generator)
    if shape["zeros"]:
        zeros = integers(-8, 8, (*outer, out, groups), torch.int8, device, generator)
    if shape["factors"]:
        factor = {"none": 1 / largest, "uint8": 1 / (128 * largest)}.get(str(shape["scales"]), 1.0)
        factors = torch.full((*outer, out), factor, dtype=torch.float32, device=device)
    return QuantisedWeight(
        kind=kind, codes=codes, scales=scales, group=int(shape["group"]), row_block=int(shape["row_block"]),
        zeros=zeros, factors=factors, rows=_rows(shape, tuple(outer), device),
    )  # fmt: skip


def _rows(shape: Shape, outer: tuple[int, ...], device: torch.device) -> RowBlocks | None:
    """The blocks of normally distributed rows; the scales of a stack's experts differ."""
    for kind, form in BLOCK_FORMATS.items():
        if shape["rows"] == kind:
            largest = torch.full(outer, 4 / (6 * 448), dtype=torch.float32, device=device)
            if outer:
                largest *= 1 + torch.arange(outer[0], dtype=torch.float32, device=device) % 4 / 4
            return RowBlocks(kind, largest if form.scales == "e4m3" else None)
    return None


def _scales(
    name: str, size: tuple[int, ...], largest: float, device: torch.device, generator: torch.Generator
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
    x, bias, activation = inputs
    if weight.rows is not None:
        x = rows_in_blocks(x, weight.rows.kind, weight.rows.scale)
    exact = _exact(weight, x, bias, activation)
    twin = F.linear(x.to(bias.dtype), dequantise(weight).to(bias.dtype), bias)
    return exact, twin if activation is None else gate(twin, activation)


def _exact(weight: QuantisedWeight, x: torch.Tensor, bias: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    exact = F.linear(x.double(), dequantise(weight).double(), bias.double())
    return exact if activation is None else gate(exact, activation)


def _twin_of_codes(weight: QuantisedWeight, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with rows that are rounded as codes are."""
    x, *others = inputs
    rounded, whole = (_exact(weight, rows, *others) for rows in (rounded_rows(x, rule_for(weight).group), x))
    return rounded, half_way(rounded, whole).to(x.dtype)


def half_way(rounded: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What stands for plain PyTorch beside a candidate that rounds rows: as much as rounding changes may be wrong.

    Less would refuse right kernels: codes depend on the last bits of what was added up before.
    """
    return (rounded + whole) / 2


class CodesProduct:
    """A product of codes, then the activation of its results."""

    def __init__(self, scaled: ScaledProduct, device_type: str) -> None:
        self.scaled, self._gate = scaled, op("gate", device_type)

    def __call__(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        out = self.scaled(x, bias)
        return out if activation is None else self._gate(out, activation)


def _in_codes(tiles: TileSizes, weight: QuantisedWeight, shape: Shape) -> Run:
    from tp_engine.kernels.quantization.linear_triton import RowTiles, TritonCodesProduct

    return CodesProduct(TritonCodesProduct(weight, RowTiles(*tiles)), weight.codes.device.type)


def _in_library_codes(weight: QuantisedWeight, shape: Shape) -> Run:
    scaled = scaled_product(weight)
    assert scaled is not None, "why_not says so"
    return CodesProduct(scaled, weight.codes.device.type)


def _in_blocks(tiles: TileSizes, weight: QuantisedWeight, shape: Shape) -> Run:
    from tp_engine.kernels.quantization.block_linear_triton import BlockScaledProduct
    from tp_engine.kernels.quantization.linear_triton import RowTiles

    multiply, activate = BlockScaledProduct(weight, RowTiles(*tiles)), op("gate", weight.codes.device.type)

    def run(x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        out = multiply(x, bias)
        return out if activation is None else activate(out, activation)

    return run


def _rounding(build: Callable[[QuantisedWeight, Shape], Run]) -> Callable[[QuantisedWeight, Shape], Run]:
    """``build`` for weights whose rows may be rounded in blocks: the product then gets their values."""

    def built(weight: QuantisedWeight, shape: Shape) -> Run:
        run, rows = build(weight, shape), weight.rows
        if rows is None:
            return run
        round_rows = op("round_rows", weight.codes.device.type)
        return lambda x, *others: run(round_rows(x, rows.kind, rows.scale), *others)

    return built


def _tiled(tiles: TileSizes, weight: QuantisedWeight, shape: Shape, *, by_compiler: bool = False) -> Run:
    from tp_engine.kernels.quantization.linear_triton import RowTiles, quantised_linear_triton

    return partial(_with_tiles, quantised_linear_triton, RowTiles(*tiles, by_compiler=by_compiler), weight)


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


def why_no_codes(shape: Shape, device: torch.device) -> str | None:
    """Why a product of ``shape`` cannot be one of codes by Triton."""
    if shape["rows"] != "e4m3":
        return "the checkpoint's rows are not rounded to 8 bits"
    if not takes_codes(random_quantised(shape, (_SMALL, _SMALL), torch.device("meta"), torch.Generator())):
        return "the weight has no 8-bit floats with scales for 32 columns or more"
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    return None if has_fp8_units(device) else "the GPU has no units for 8-bit floats"


def why_no_blocks(shape: Shape, device: torch.device) -> str | None:
    """Why a product of ``shape`` cannot be one of rows in blocks and weights in blocks."""
    kind = next((kind for kind in BLOCK_FORMATS if kind == shape["rows"]), None)
    if kind is None:
        return "rows are not rounded in blocks"
    weight = random_quantised(shape, (_SMALL, _SMALL), torch.device("meta"), torch.Generator())
    if not has_blocks(weight, kind) or shape["type"] != name_of(PRODUCT_DTYPE):
        return "it multiplies rows of bfloat16 with weights in the same whole blocks"
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    has_units = torch.cuda.get_device_capability(device)[0] in _BLOCK_CAPABILITIES
    return None if has_units else "the GPU has no units for blocks with scales"


def why_no_mx(shape: Shape, device: torch.device) -> str | None:
    """Why a product of ``shape`` cannot be one by ``dot_scaled``, which refuses NVFP4's scales."""
    is_mxfp4 = (shape["codes"], shape["scales"], shape["group"]) == ("e2m1", "float8_e8m0fnu", 32)
    if not is_mxfp4 or shape["type"] != "bfloat16":
        return "it multiplies MXFP4 with rows of bfloat16"
    return why_no_triton(shape, device)


def _why_no_library_codes(shape: Shape, device: torch.device) -> str | None:
    if shape["rows"] != "e4m3" or shape["codes"] != "e4m3":
        return "it multiplies 8-bit floats with 8-bit floats"
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    weight = _weights(shape, torch.device("meta"), torch.Generator())
    is_there = has_fp8_units(device) and has_scaled_product(weight, device)
    return None if is_there else "PyTorch has no such product here, or it is wrong"


def _default(shape: Shape, device: torch.device) -> Choice:
    of_one = ((1, "row"),) if has_triton() and _takes_row(shape) else ()
    of_few = tuple((rows, _tiles_name(tiles)) for rows, (tiles, _, _) in zip(_OWN_ROWS, _TILES, strict=True))
    if _why_no_library_codes(shape, device) is None:
        of_few = tuple(line for line in of_few if line[0] <= FEW_ROWS_BESIDE_CODES)
        return (*of_one, *of_few, (MANY, "library-codes"))
    return (*of_one, *of_few, (MANY, "dequantise"))


OPERATION = Operation(
    candidates=(
        Candidate(name="row", build=_rounding(_of_row), why_not=_why_no_row, most_rows=1),
        *(
            Candidate(
                name=_tiles_name(tiles), build=_rounding(partial(_tiled, tiles)), why_not=why_no_triton,
                least_rows=least, most_rows=most, is_quick=is_quick,
            )
            for some, is_quick in ((_TILES, True), (_MORE_TILES, False))
            for tiles, least, most in some
        ),
        Candidate(name="dequantise", build=_rounding(_dequantised), why_not=why_no_triton),
        *(
            Candidate(
                name=_tiles_name(tiles, "codes"), build=partial(_in_codes, tiles), why_not=why_no_codes,
                least_rows=least, twin=_twin_of_codes,
            )
            for tiles, least in _CODE_TILES
        ),
        *(
            Candidate(
                name=_tiles_name(tiles, "mx"), build=_rounding(partial(_tiled, tiles, by_compiler=True)),
                why_not=why_no_mx, least_rows=least, is_quick=False,
            )
            for tiles, least in _MX_TILES
        ),
        *(
            Candidate(
                name=_tiles_name(tiles, "blocks"), build=partial(_in_blocks, tiles), why_not=why_no_blocks,
                least_rows=least,
            )
            for tiles, least in BLOCK_TILES
        ),
        Candidate(
            name="library-codes", build=_in_library_codes, why_not=_why_no_library_codes, twin=_twin_of_codes
        ),
    ),
    default=_default,
    weights=_weights,
    inputs=_inputs,
    twin=_twin,
    num_bytes=lambda shape: int(shape["in"]) * int(shape["out"]) // values_per_byte(_codes(shape)),
    sources=("kernels/quantization/*.py", "kernels/elementwise_triton.py", "kernels/dependent_launch_triton.py"),
    copy=lambda weight: weight.map(torch.clone),
)  # fmt: skip
