"""The cases of the modules ``kernel_cases_*``, interpreted."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from tests.unit.kernels import kernel_cases_gather
from tests.unit.kernels.kernel_harness import CASE_MODULES
from tp_engine.kernels.sampling import (
    best_triton,
    candidates_triton,
    filter_triton,
    nucleus_ranks_triton,
    nucleus_triton,
)

# Half of the time; the interpreted engine of the fast tier runs their usual kernels, too.
LONG = ("latents", "sampling")
CASES = [
    pytest.param(check, id=f"{module}: {name}", marks=[pytest.mark.slow] if module in LONG else [])
    for module in CASE_MODULES
    for name, check in importlib.import_module(f"tests.unit.kernels.kernel_cases_{module}").CASES.items()
]


@pytest.fixture(autouse=True)
def several_blocks_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling has several blocks of few tokens, and too few candidates for some rows."""
    for module in (best_triton, filter_triton, candidates_triton, nucleus_triton, nucleus_ranks_triton):
        monkeypatch.setattr(module, "_BLOCK", 256)
    for name, size in (("_CHUNK", 128), ("_GROUPS", 16), ("_KEPT", 16)):
        monkeypatch.setattr(candidates_triton, name, size)


@pytest.mark.parametrize("check", CASES)
def test_kernel(check: Callable[[str], None]) -> None:
    """Oracle: the module's own, mostly its PyTorch twin or float64."""
    check("cpu")


@pytest.mark.parametrize("world_size", [2, 4])
def test_gather_of_processes(world_size: int) -> None:
    """Oracle: the parts, one behind the other; ranks in processes come at other times to each of several all-gathers,
    which share the buffers."""
    kernel_cases_gather.check_ranks(world_size, num_calls=len(kernel_cases_gather.SIZES))
