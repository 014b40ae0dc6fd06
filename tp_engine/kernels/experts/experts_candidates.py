"""A layer's experts on a GPU, by the number of tokens: which of Triton's tiles, or a library's grouped products.

::

    tiles-MxN    M pairs by N outputs; weights of few bits are widened in registers    experts_triton
    codes-MxN    both products in units for 8-bit floats: their rows are rounded       experts_triton
    mx-MxN       Triton's dot_scaled widens MXFP4                                      experts_triton
    blocks-MxN   rows in blocks meet weights in blocks, in units for both              experts_triton
    library      PyTorch's grouped products                                            grouped

The code's own choice is a table of tiles by the pairs of an expert, the same for all models and GPUs.  No tile for many
pairs needs more registers than a GPU of compute capability 9.0 or 10.0 has: what goes through memory instead costs more
than a larger tile gains.

Rows are rounded only if the checkpoint prescribes that (``rows`` of a shape), as its makers' own kernels do.  Rows in
blocks are asked for: all candidates round them, and so does their one twin.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

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
    normal,
    why_no_triton,
)
from tp_engine.kernels.experts.experts import ExpertWeights, Weights, mix_experts
from tp_engine.kernels.experts.grouped import grouped_experts, why_no_grouped
from tp_engine.kernels.experts.tiles import DENSE_TILES, GROUPED_MM_FROM, QUANTISED_TILES, Tiles
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS
from tp_engine.kernels.quantization.block_rows import rounded_rows as rows_in_blocks
from tp_engine.kernels.quantization.linear_candidates import (
    format_of,
    half_way,
    name_of,
    random_quantised,
    rows_of,
    why_no_blocks,
    why_no_codes,
    why_no_mx,
)
from tp_engine.kernels.quantization.row_codes import rounded_rows, rule_for
from tp_engine.kernels.quantization.weights import QuantisedWeight, dequantise
from tp_engine.model_config.mlp import SILU, Activation
from tp_engine.system.units import ceil_div

NAME = "experts"
_RoundRows: TypeAlias = Callable[[torch.Tensor, QuantisedWeight], torch.Tensor]
_OTHER_WEIGHTS = "it is for other weights"
# Tiles that no table has, for weights of the type of rows, and for quantised ones.
_MORE_DENSE_TILES = (Tiles(16, 128, 64, 4, 4), Tiles(128, 64, 64, 8, 4))
_MORE_QUANTISED_TILES = (Tiles(16, 128, 64, 8, 3), Tiles(64, 64, 64, 4, 3))
_MX_TILES = (Tiles(16, 64, 64, 4, 4, True), Tiles(64, 128, 64, 8, 3, True), Tiles(128, 128, 64, 8, 3, True))
# Columns of these are bytes of codes; 128 rows would spill registers on GPUs of 12.x.
BLOCK_TILES = (Tiles(16, 128, 128, 4, 3), Tiles(64, 128, 128, 8, 3))
_CODE_TILES = (Tiles(16, 64, 64, 4, 4), Tiles(64, 128, 64, 8, 4), Tiles(128, 64, 64, 8, 3))


def shape_of(
    weights: ExpertWeights[Weights], top_k: int, num_ids: int, dtype: torch.dtype, *, rounds_rows: bool
) -> Shape:
    """The shape of these experts on one rank, ``top_k`` of ``num_ids`` on all ranks for each token."""
    num_experts, hidden, inner = weights.down.shape
    up, down = _format(weights.gate_up), _format(weights.down)
    rows = weights.down.rows if isinstance(weights.down, QuantisedWeight) else None
    return {
        "experts": num_experts, "of": num_ids, "top_k": top_k, "hidden": hidden, "inner": inner, "type": name_of(dtype),
        "parts": weights.activation.num_parts, "bias": int(weights.gate_up_bias is not None), **up,
        **{f"down_{name}": value for name, value in down.items() if value != up.get(name)},
        "rows": rows_of(dtype, rounds_rows=rounds_rows) if rows is None else rows.kind,
    }  # fmt: skip


def _format(weight: Weights) -> dict[str, int | str]:
    return format_of(weight) if isinstance(weight, QuantisedWeight) else {"codes": "none"}


def _down_format(shape: Shape) -> Shape:
    return {**shape, **{name.removeprefix("down_"): one for name, one in shape.items() if name.startswith("down_")}}


def random_experts(shape: Shape, device: torch.device, generator: torch.Generator) -> ExpertWeights[Weights]:
    """Random weights of ``shape``."""
    count, hidden, inner = (int(shape[name]) for name in ("experts", "hidden", "inner"))
    rows, dtype = int(shape["parts"]) * inner, getattr(torch, str(shape["type"]))

    def weight(of: Shape, size: tuple[int, ...]) -> Weights:
        if of["codes"] != "none":
            return random_quantised(of, size, device, generator)
        found: torch.Tensor = (normal(size, device, generator) * size[-1] ** -0.5).to(dtype)
        return found

    def bias(size: int) -> torch.Tensor | None:
        return normal((count, size), device, generator).to(dtype) if shape["bias"] else None

    return ExpertWeights(
        gate_up=weight(shape, (count, rows, hidden)),
        down=weight(_down_format(shape), (count, hidden, inner)),
        gate_up_bias=bias(rows),
        down_bias=bias(hidden),
        first=0,
        activation=Activation("relu2") if shape["parts"] == 1 else SILU,
    )


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows, the ids of their experts, and shares that add up to 1."""
    top_k, num_ids = int(shape["top_k"]), int(shape["of"])
    x = normal((num_rows, int(shape["hidden"])), device, generator).to(getattr(torch, str(shape["type"])))
    scores = torch.rand((num_rows, num_ids), generator=generator, dtype=torch.float32, device="cpu")
    found = scores.topk(top_k)
    shares = found.values / found.values.sum(1, keepdim=True)
    return x, found.indices.to(device, torch.int32), shares.to(device)


def _twin(weights: ExpertWeights[Weights], shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, shares = inputs
    if shape["rows"] in BLOCK_FORMATS:
        return _twin_of_rounded(weights, inputs, _in_blocks)
    return _exact(weights, inputs, _whole), mix_experts(x, ids, shares, weights)


def _twin_of_codes(weights: ExpertWeights[Weights], shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return _twin_of_rounded(weights, inputs, _in_codes)


def _twin_of_rounded(
    weights: ExpertWeights[Weights], inputs: Inputs, round_rows: _RoundRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same arithmetic; one sum that is rounded to the other side changes the codes of its whole group."""
    rounded, whole = (_exact(weights, inputs, one) for one in (round_rows, _whole))
    return rounded, half_way(rounded, whole).to(inputs[0].dtype)


def _whole(rows: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    return rows


def _in_codes(rows: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    return rounded_rows(rows, rule_for(weight).group)


def _in_blocks(rows: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    assert weight.rows is not None
    return rows_in_blocks(rows, weight.rows.kind, weight.rows.scale)


def _exact(weights: ExpertWeights[Weights], inputs: Inputs, round_rows: _RoundRows) -> torch.Tensor:
    """The experts in float64; what products with quantised weights read, goes through ``round_rows``."""
    x, ids, shares = inputs
    outputs: torch.Tensor = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float64)

    def product(rows: torch.Tensor, stack: Weights, biases: torch.Tensor | None, index: int) -> torch.Tensor:
        bias = None if biases is None else biases[index].double()
        if not isinstance(stack, QuantisedWeight):
            return F.linear(rows.double(), stack[index].double(), bias)
        own = stack.expert(index)
        rows = rows if round_rows is _whole else round_rows(rows.to(x.dtype), own)
        return F.linear(rows.double(), dequantise(own).double(), bias)

    for index in {*ids.flatten().tolist()} & {*range(weights.down.shape[0])}:
        tokens, places = (ids == index).nonzero(as_tuple=True)
        inner = gate(product(x[tokens], weights.gate_up, weights.gate_up_bias, index), weights.activation)
        outputs[tokens, places] = product(inner, weights.down, weights.down_bias, index)
    outputs *= shares.double().unsqueeze(-1)
    return outputs.sum(1)


def _tiled(tiles: Tiles, weights: ExpertWeights[Weights], shape: Shape, **how: bool) -> Run:
    from tp_engine.kernels.experts.experts_triton import TritonExperts

    return TritonExperts(weights, tiles, **how)


def _of_library(weights: ExpertWeights[Weights], shape: Shape) -> Run:
    from tp_engine.kernels.experts.experts_triton import LibraryExperts

    return LibraryExperts(weights, grouped_experts(weights))


def _is_quantised(shape: Shape) -> bool:
    return shape["codes"] != "none"


def _why_no_tiles(tiles: Tiles, shape: Shape, device: torch.device) -> str | None:
    table = _OF_QUANTISED if _is_quantised(shape) else _OF_DENSE
    return why_no_triton(shape, device) if tiles in table else _OTHER_WEIGHTS


def _why_no_codes(shape: Shape, device: torch.device) -> str | None:
    return why_no_codes(shape, device) or why_no_codes(_down_format(shape), device)


def _why_no_blocks(shape: Shape, device: torch.device) -> str | None:
    if not _is_quantised(shape):
        return _OTHER_WEIGHTS
    return why_no_blocks(shape, device) or why_no_blocks(_down_format(shape), device)


def _why_no_mx(shape: Shape, device: torch.device) -> str | None:
    if not _is_quantised(shape):
        return _OTHER_WEIGHTS
    return why_no_mx(shape, device) or why_no_mx(_down_format(shape), device)


def _why_no_library(shape: Shape, device: torch.device, *, is_quantised: bool) -> str | None:
    if is_quantised != _is_quantised(shape):
        return _OTHER_WEIGHTS
    weights = random_experts(shape, torch.device("meta"), torch.Generator())
    return why_no_triton(shape, device) or why_no_grouped(weights, device, rounds_rows=shape["rows"] == "e4m3")


def _default(shape: Shape, device: torch.device) -> Choice:
    is_quantised, count, top_k = _is_quantised(shape), int(shape["experts"]), int(shape["top_k"])
    table = QUANTISED_TILES if is_quantised else DENSE_TILES
    lines = [(min(most * count // top_k, MANY), f"tiles-{tiles.name}") for most, tiles in table]
    if _why_no_library(shape, device, is_quantised=is_quantised) is not None:
        return tuple(lines)
    most = ceil_div(GROUPED_MM_FROM * count, top_k) - 1
    return (*lines[:-1], (most, lines[-1][1]), (MANY, "library-codes" if is_quantised else "library"))


def _num_bytes(shape: Shape) -> int:
    """All experts, as a step of many requests reads them."""
    weights = random_experts(shape, torch.device("meta"), torch.Generator())
    return sum(
        one.nbytes if isinstance(one, torch.Tensor) else one.num_bytes for one in (weights.gate_up, weights.down)
    )


def _copy(weights: ExpertWeights[Weights]) -> ExpertWeights[Weights]:
    both = (
        one.clone() if isinstance(one, torch.Tensor) else one.map(torch.clone)
        for one in (weights.gate_up, weights.down)
    )
    gate_up, down = both
    return replace(weights, gate_up=gate_up, down=down)


_OF_DENSE = (*(tiles for _, tiles in DENSE_TILES), *_MORE_DENSE_TILES)
_OF_QUANTISED = (*(tiles for _, tiles in QUANTISED_TILES), *_MORE_QUANTISED_TILES)
_QUICK = {tiles for _, tiles in (*DENSE_TILES, *QUANTISED_TILES)}

OPERATION = Operation(
    candidates=(
        *(
            Candidate(
                name=f"tiles-{tiles.name}", build=partial(_tiled, tiles), why_not=partial(_why_no_tiles, tiles),
                is_quick=tiles in _QUICK,
            )
            for tiles in dict.fromkeys((*_OF_DENSE, *_OF_QUANTISED))
        ),
        *(
            Candidate(
                name=f"codes-{tiles.name}", build=partial(_tiled, tiles, rounds_rows=True), why_not=_why_no_codes,
                twin=_twin_of_codes,
            )
            for tiles in _CODE_TILES
        ),
        *(
            Candidate(name=f"mx-{tiles.name}", build=partial(_tiled, tiles), why_not=_why_no_mx)
            for tiles in _MX_TILES
        ),
        *(
            Candidate(
                name=f"blocks-{tiles.name}", build=partial(_tiled, tiles, in_blocks=True), why_not=_why_no_blocks
            )
            for tiles in BLOCK_TILES
        ),
        Candidate(name="library", build=_of_library, why_not=partial(_why_no_library, is_quantised=False)),
        Candidate(
            name="library-codes", build=_of_library, why_not=partial(_why_no_library, is_quantised=True),
            twin=_twin_of_codes,
        ),
    ),
    default=_default,
    weights=random_experts,
    inputs=_inputs,
    twin=_twin,
    num_bytes=_num_bytes,
    sources=("kernels/experts/*.py", "kernels/quantization/*.py", "kernels/*_triton.py"),
    copy=_copy,
    rows_of=lambda inputs, rows: tuple(one[rows] for one in inputs),
)  # fmt: skip
