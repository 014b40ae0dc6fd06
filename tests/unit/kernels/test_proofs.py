"""What a GPU asks of a kernel before it takes it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tp_engine.kernels import ops
from tp_engine.kernels.gated_delta_net import gated_delta_net_prefill as twin
from tp_engine.kernels.ops import OPS
from tp_engine.kernels.proofs import TRIALS, why_not

TRIAL = TRIALS["gated_delta_net_prefill"](torch.device("cpu"))


def one_product_of_tf32(*arguments: Any) -> torch.Tensor:
    return twin(*arguments) * (1 + 2.0**-11)


def wrong_state(mixed: torch.Tensor, gates: torch.Tensor, rule: Any, states: Any, chunks: Any) -> torch.Tensor:
    found = twin(mixed, gates, rule, states, chunks)
    states.recurrent[2] *= 1.001
    return found


def no_number(*arguments: Any) -> torch.Tensor:
    found = twin(*arguments)
    found[3, 5] = torch.nan
    return found


def crashing(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        (twin, None),
        (one_product_of_tf32, r"its error is .*, where .* is allowed"),
        (wrong_state, r"its error is .*, where .* is allowed"),
        (no_number, r"its error is nan"),
        (crashing, r"RuntimeError: out of resource: shared memory"),
    ],
)
def test_a_wrong_kernel_is_named(candidate: Callable[..., torch.Tensor], problem: str | None) -> None:
    """Oracle: the twin in float64; faults in the output, in the state behind it, and in the run."""
    found = why_not(candidate, twin, TRIAL, lambda: 0.0)
    assert found is None if problem is None else re.search(problem, str(found))


@pytest.mark.parametrize(("slower", "is_taken"), [(1, False), (0, True)])
def test_a_slow_kernel_is_not_taken(slower: int, is_taken: bool) -> None:
    """Oracle: a clock by hand; the candidate's three runs come first."""
    now, calls = [0.0], itertools.count()

    def clock() -> float:
        is_candidate = next(calls) < 6
        now[0] += 0.002 if is_candidate == bool(slower) else 0.001
        return now[0]

    found = why_not(twin, twin, TRIAL, clock)
    assert found is None if is_taken else found == "it takes 2.00 ms, and PyTorch 1.00 ms"


def test_the_twin_is_taken_where_the_kernel_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the kind of the operation, and the log; without a GPU there is nothing to prove."""
    name = "mamba2_prefill"
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(ops, "_is_proven", ops._is_proven.__wrapped__)
    assert ops.kind_of(name, "cuda") == "triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for problem, kind in (("its error is 1, where 0 is allowed", "twin"), (None, "triton")):
        monkeypatch.setattr(ops, "why_not", lambda *_, problem=problem: problem)
        assert ops.kind_of(name, "cuda") == kind
    assert caplog.text.count("its kernel failed here: its error is 1") == 1


def test_trials_are_of_operations_with_kernels() -> None:
    """Oracle: the table of operations."""
    assert all(OPS[name].triton is not None for name in TRIALS)
