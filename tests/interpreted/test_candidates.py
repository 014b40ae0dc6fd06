"""The candidates of operations on GPUs, interpreted: each is right by the proof that it gets on a user's device."""

from __future__ import annotations

import pytest
import torch

from tp_engine.kernels.candidates import MANY, Shape, operation
from tp_engine.worker.tuning.proof import ProofQuestions, largest_error

CPU = torch.device("cpu")
_QUANTISED: Shape = {
    "in": 128, "out": 64, "type": "bfloat16", "codes": "int4", "scales": "uint8", "group": 32, "row_block": 1,
    "zeros": 1, "factors": 1, "parts": 0,
}  # fmt: skip
_WHOLE: Shape = {**_QUANTISED, "scales": "none", "group": 0, "zeros": 0}
SHAPES: dict[str, Shape] = {
    "int4": _QUANTISED,
    "int4, gate and up": {**_QUANTISED, "parts": 2},
    "e4m3": {**_WHOLE, "codes": "e4m3"},
    "e4m3, blocks": {**_WHOLE, "codes": "e4m3", "scales": "float32", "group": 64, "row_block": 32, "factors": 0},
    "int8, relu2": {**_WHOLE, "codes": "int8", "parts": 1},
    "mxfp4": {**_WHOLE, "codes": "e2m1", "scales": "float8_e8m0fnu", "group": 32, "factors": 0},
    "nvfp4": {**_WHOLE, "codes": "e2m1", "scales": "float8_e4m3fn", "group": 16},
}
TABLE = operation("quantised_linear")


@pytest.mark.parametrize("name", SHAPES)
def test_quantised_products(name: str) -> None:
    """Oracle: float64, within the bound of the proof, at the fewest rows that a candidate is for, and one more than a
    tile has; the code's own choice names candidates of the table."""
    shape = SHAPES[name]
    weights = TABLE.weights(shape, CPU, torch.Generator().manual_seed(0))
    questions = ProofQuestions(TABLE, weights, shape, CPU)
    default = TABLE.default(shape, CPU)
    assert default[-1][0] == MANY and all(TABLE.named(one) for _, one in default)
    for candidate in TABLE.candidates:
        rows = {candidate.least_rows, min(candidate.most_rows, 17)} - {0}
        run = candidate.build(weights, shape)
        error, at = largest_error(run, questions, filter(candidate.takes, sorted(rows)), CPU)
        assert error <= 1, (candidate.name, error, at)
