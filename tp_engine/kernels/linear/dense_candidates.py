"""Products with weights of the model's own type on a GPU, by the number of rows.

::

    row             one row: every program reads whole rows of the weight             one_row_linear_triton
    few-RxO-...     up to R rows, O outputs of a program: the columns are split       few_rows_linear_triton
    library         any number: PyTorch's

The code's own choice is ``row``, but for vocabularies, then the library: ``few`` has not met a GPU of ours.
"""

from functools import partial

import torch
import torch.nn.functional as F

from tp_engine.kernels.attention.paged_candidates import num_multiprocessors
from tp_engine.kernels.candidates import MANY, Candidate, Choice, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.ops import has_triton, op
from tp_engine.model_config.mlp import SILU, Activation

NAME = "dense_linear"
# With more outputs, such as a vocabulary, the library reads the weight of one row as fast as memory allows.
_MOST_OUTPUTS = 1 << 16
_ACTIVATIONS: dict[int, Activation | None] = {0: None, 1: Activation("relu2"), 2: SILU}
# Rows, outputs, columns of a step, warps, stages and splits of a program; the least rows that it is worth a trial for.
_FEW = (
    ((8, 64, 128, 4, 3, 16), 2),
    ((16, 64, 128, 4, 3, 16), 2),
    ((32, 64, 128, 4, 3, 8), 9),
    ((64, 64, 64, 4, 4, 8), 17),
)
_MORE_FEW = (((128, 64, 64, 8, 3, 4), 33), ((256, 64, 32, 8, 3, 2), 65))


def shape_of(weight: torch.Tensor, activation: Activation | None) -> Shape:
    """The shape of products by ``weight`` (out, in)."""
    return {
        "in": weight.shape[1], "out": weight.shape[0], "type": str(weight.dtype).removeprefix("torch."),
        "parts": 0 if activation is None else activation.num_parts,
    }  # fmt: skip


def _dtype(shape: Shape) -> torch.dtype:
    found = getattr(torch, str(shape["type"]))
    assert isinstance(found, torch.dtype)
    return found


def _of_row(weight: torch.Tensor, shape: Shape) -> Run:
    from tp_engine.kernels.linear.one_row_linear_triton import one_row_linear_triton

    return lambda x, bias, activation: one_row_linear_triton(x, weight, bias, activation)


def _takes_row(shape: Shape) -> bool:
    from tp_engine.kernels.linear.one_row_linear_triton import takes_weight

    weight = torch.empty((int(shape["out"]), int(shape["in"])), dtype=_dtype(shape), device="meta")
    return takes_weight(weight, is_gated=shape["parts"] == 2)


def _why_no_row(shape: Shape, device: torch.device) -> str | None:
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    return None if _takes_row(shape) else "its rows are no whole blocks"


def _of_few(numbers: tuple[int, ...], weight: torch.Tensor, shape: Shape) -> Run:
    from tp_engine.kernels.linear.few_rows_linear_triton import FewRowsTiles, few_rows_linear_triton

    tiles = FewRowsTiles(*numbers)
    arrivals = torch.zeros(len(weight) // tiles.block_out, dtype=torch.int32, device=weight.device)

    def run(x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        return few_rows_linear_triton(
            x, weight, bias, activation, tiles=tiles, arrivals=arrivals,
            num_multiprocessors=num_multiprocessors(weight.device),
        )  # fmt: skip

    return run


def _why_not_few(numbers: tuple[int, ...], shape: Shape, device: torch.device) -> str | None:
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    from tp_engine.kernels.linear.few_rows_linear_triton import FewRowsTiles, takes_weight

    # Without the activation a weight of gate and up is one of twice as many outputs, of as many tiles.
    outputs = int(shape["out"]) // (2 if shape["parts"] == 2 else 1)
    if not takes_weight(outputs, int(shape["in"]), FewRowsTiles(*numbers)):
        return "it is no whole number of tiles"
    return None if _dtype(shape).itemsize == 2 else "it is for types of 16 bits, which matrix units multiply"


def _of_library(weight: torch.Tensor, shape: Shape) -> Run:
    activate = op("gate", weight.device.type)

    def run(x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        product = F.linear(x, weight, bias)
        found: torch.Tensor = product if activation is None else activate(product, activation)
        return found

    return run


def _default(shape: Shape, device: torch.device) -> Choice:
    of_row = has_triton() and int(shape["out"]) <= _MOST_OUTPUTS and _takes_row(shape)
    return (*(((1, "row"),) if of_row else ()), (MANY, "library"))


def _weights(shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    size = int(shape["out"]), int(shape["in"])
    values: torch.Tensor = normal(size, device, generator) * size[1] ** -0.5
    return values.to(_dtype(shape))


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    rows = normal((num_rows, int(shape["in"])), device, generator).to(_dtype(shape))
    bias = normal((int(shape["out"]),), device, generator).to(_dtype(shape))
    return rows, bias, _ACTIVATIONS[int(shape["parts"])]


def _twin(weight: torch.Tensor, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x, bias, activation = inputs
    exact, twin = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
    return (exact, twin) if activation is None else (gate(exact, activation), gate(twin, activation))


def _few_name(numbers: tuple[int, ...]) -> str:
    rows, outputs, columns, warps, stages, splits = numbers
    return f"few-{rows}x{outputs}x{columns}-w{warps}-s{stages}-p{splits}"


OPERATION = Operation(
    candidates=(
        Candidate(name="row", build=_of_row, why_not=_why_no_row, most_rows=1),
        Candidate(name="library", build=_of_library),
        *(
            Candidate(
                name=_few_name(numbers), build=partial(_of_few, numbers), why_not=partial(_why_not_few, numbers),
                least_rows=least, most_rows=numbers[0], is_quick=is_quick,
            )
            for some, is_quick in ((_FEW, True), (_MORE_FEW, False))
            for numbers, least in some
        ),
    ),
    default=_default,
    weights=_weights,
    inputs=_inputs,
    twin=_twin,
    num_bytes=lambda shape: int(shape["in"]) * int(shape["out"]) * _dtype(shape).itemsize,
    sources=(
        "kernels/linear/dense_candidates.py", "kernels/linear/*_rows_linear_triton.py",
        "kernels/linear/one_row_linear_triton.py", "kernels/elementwise_triton.py", "kernels/arrivals_triton.py",
        "kernels/dependent_launch_triton.py",
    ),
    copy=torch.clone,
)  # fmt: skip
