"""Pairs of rows and experts, and the products of experts that are apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, random
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.library import native_library
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.experts.pairs import ExpertRun, multiply_runs, pair_up
from tp_engine.model_config.mlp import SILU

HIDDEN, RUNS = 48, [ExpertRun(0, 0, 1), ExpertRun(2, 1, 37), ExpertRun(3, 38, 5)]


def test_pairs_by_expert() -> None:
    """Oracle: by hand: 3 experts here, of which one has no pair; others are on another rank."""
    found = pair_up(np.array([[2, -1], [0, 2], [3, 2]], dtype=np.int32), 3)
    assert found.order.tolist() == [2, 0, 3, 5]
    assert found.experts.tolist() == [0, 2, 2, 2]
    assert found.runs == [ExpertRun(0, 0, 1), ExpertRun(2, 1, 3)]
    assert pair_up(np.full((2, 2), -1, dtype=np.int32), 3).runs == []


@pytest.mark.parametrize("inner", [8, 40, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_c(dtype: torch.dtype, inner: int) -> None:
    """Oracle: the twin; and each row alone, bit for bit."""
    library = native_library()
    assert library is not None
    gate_up, down = random((4, 2 * inner, HIDDEN), dtype, "cpu", 1), random((4, HIDDEN, inner), dtype, "cpu", 2)
    weights = ExpertWeights(gate_up=gate_up, down=down, gate_up_bias=None, down_bias=None, first=0, activation=SILU)
    product = NativeExperts(library, weights, 2)
    for apply, stack in ((product.gate_up, gate_up), (product.down, down)):
        x = random((43, stack.shape[2]), dtype, "cpu", 3)
        found = apply(x, RUNS)
        expected = multiply_runs(x, stack, RUNS)
        assert_close_enough(found, expected, multiply_runs(x.double(), stack.double(), RUNS))
        for expert, first, num_pairs in RUNS:
            for row in (first, first + num_pairs - 1):
                assert torch.equal(apply(x[row : row + 1], [ExpertRun(expert, 0, 1)])[0], found[row])
