"""The candidates of every operation are right where they can run, and the code's own choice names right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels import kernel_cases_candidates
from tp_engine.kernels.candidates import CANDIDATES, MANY, Shape, operation
from tp_engine.worker.tuning import proof
from tp_engine.worker.tuning.proof import ODD_ROWS, Expected, ProofQuestions, largest_error
from tp_engine.worker.tuning.tuner import Tuner, WantedShape

CPU = torch.device("cpu")
SHAPES: dict[str, list[Shape]] = {
    "int8_linear": [{"in": 192, "out": 160, "type": name} for name in ("bfloat16", "float32", "float16")],
}
# On GPUs: in tests/unit/kernels/kernel_cases_candidates.py, interpreted.
ELSEWHERE = {name for name, _, _ in kernel_cases_candidates.SHAPES.values()}
ALL = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def test_every_operation_is_tried_here() -> None:
    """Oracle: the table of operations with candidates."""
    assert SHAPES.keys() | ELSEWHERE == CANDIDATES.keys()


@pytest.mark.parametrize(("name", "shape"), ALL, ids=str)
def test_candidates_are_right(name: str, shape: Shape) -> None:
    """Oracle: float64.  Candidates that need another device say so; a shape's own choice is of the table, up to any
    rows."""
    table = operation(name)
    weights = table.weights(shape, CPU, torch.Generator().manual_seed(0))
    questions = ProofQuestions(table, weights, shape, CPU)
    default = table.default(shape, CPU)
    assert default[-1][0] == MANY and all(table.named(one) for _, one in default)
    assert [most for most, _ in default] == sorted({most for most, _ in default})
    for candidate in table.candidates:
        if candidate.why_not(shape, CPU) is not None:
            assert candidate.name not in {one for _, one in default}
            continue
        run = candidate.build(weights, shape)
        error, at = largest_error(run, questions, filter(candidate.takes, ODD_ROWS), CPU)
        assert error <= 1, (candidate.name, error, at)


def test_a_row_that_is_mostly_one_value_may_be_rounded() -> None:
    """By hand: bfloat16 rounds by up to 2**-9; a gated product is rounded three times, and a twin may have been lucky
    each time.  Where many values make a row, that much on every one of them is too much."""
    few, many = torch.zeros(1, 32, dtype=torch.float64), torch.ones(1, 4096, dtype=torch.float64)
    few[0, 3] = 4.0
    for exact, is_right in ((few, True), (many, False)):
        expected = Expected(exact, proof._bound(exact, exact.bfloat16(), 1, by_row=True), None)
        assert (expected.error(exact * (1 + 3 * 2.0**-9), 1) <= 1) == is_right


def test_a_wrong_weight_is_seen() -> None:
    """Oracle: weights that are all off by a tenth of their spread, which a bound by the largest value passes."""
    table, shape = operation("int8_linear"), SHAPES["int8_linear"][0]
    weights = table.weights(shape, CPU, torch.Generator().manual_seed(0))
    questions = ProofQuestions(table, weights, shape, CPU)
    spread = float((weights.codes * weights.scales.unsqueeze(1)).std())
    moved = weights.codes.float() + 0.1 * spread / weights.scales.unsqueeze(1)
    wrong = weights._replace(codes=moved.round().clamp(-127, 127).to(torch.int8))
    for candidate in table.candidates:
        error, _ = largest_error(candidate.build(wrong, shape), questions, ODD_ROWS, CPU)
        assert error > 3, candidate.name


INT8_WITH_A_WRONG_DEFAULT = """
from dataclasses import replace
from tp_engine.kernels.candidates import MANY
from tp_engine.kernels.quantization.int8_products import OPERATION as OWN
OPERATION = replace(OWN, default=lambda shape, device: ((MANY, "onednn"),))
"""


def test_the_tuner_finds_the_int8_product_of_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: C took 0.34 to 0.39 of oneDNN's time for one row where it was measured; here any clear gain will do, and
    the code's own choice is planted as it was: oneDNN for all rows."""
    (tmp_path / "int8_planted.py").write_text(INT8_WITH_A_WRONG_DEFAULT)
    monkeypatch.syspath_prepend(tmp_path)
    shape: dict[str, Any] = {"in": 576, "out": 960, "type": "bfloat16"}
    tuner = Tuner(device=CPU, places={"int8_linear": ":int8_planted"}, rows=(1,), budget_s=120, silence_s=60)
    found = tuner.tune([WantedShape(operation="int8_linear", shape=shape)])[0]
    assert found.default == ((MANY, "onednn"),) and found.choice == ((MANY, "panels"),)
