"""How Triton kernels are tested where there is no GPU.

* ``interpreted(module)`` runs a module of cases with TRITON_INTERPRET=1: the kernels' numbers on a CPU.
* ``compiled_for(capability)`` turns every launch into a compilation for that GPU: call the host wrapper with tensors
  that resemble the engine's (on the meta device, of any size), and exactly the specialisation that the engine would
  launch is made into machine code.

``tests/gpu`` runs the same cases on CUDA.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tp_engine.kernels import ops
from tp_engine.kernels.ops import has_triton

ROOT = Path(__file__).parents[3]
CAPABILITIES = (80, 90, 100)
AGREEMENT = "all cases agree"

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
# Triton warns of its own environment variable while it compiles for some targets.
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def interpreted(module: str, *arguments: str, timeout_s: float = 170.0) -> None:
    """Run ``main(*arguments)`` of ``tests.unit.kernels.<module>``, interpreted; it must print ``AGREEMENT``.

    It runs in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
    """
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 can not loop with numpy from 2.4 on: update one of them")
    result = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.kernel_interpreter", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert AGREEMENT in result.stdout


@contextmanager
def triton_ops_on_cpus() -> Iterator[set[str]]:
    """Inside, the layers use Triton's operations, where they exist, for CPU tensors too; yields the operations they
    used."""
    taken: set[str] = set()

    def kind_of(name: str, device_type: str) -> ops.Kind:
        taken.add(name)
        return "twin" if ops.OPS[name].triton is None else "triton"

    chosen = (ops.op, ops.is_recordable)
    with patch.object(ops, "kind_of", kind_of):
        for function in chosen:
            function.cache_clear()
        yield taken
    for function in chosen:
        function.cache_clear()


def _version(package: str) -> tuple[int, int]:
    """Major and minor version of an installed package."""
    major, minor, *_ = metadata.version(package).split(".")
    return int(major), int(minor)


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Any]]:
    """Inside, launches compile for a GPU of this capability (90: sm_90) and do not run; yields the compiled kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tp_engine.kernels import dependent_launch_triton
    from tp_engine.kernels.quantization import values_triton

    kernels: list[Any] = []
    launch, active = JITFunction.run, driver._active  # without a GPU, asking for the active driver fails

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(launch(self, *args, **(kwargs | {"warmup": True})))
        return kernels[-1]

    driver.set_active(_Target(f"sm_{capability}", GPUTarget("cuda", capability, 32)))
    JITFunction.run = compile_only
    try:
        with (
            patch.object(dependent_launch_triton, "can_launch_early", lambda device: capability >= 90),
            patch.object(values_triton, "has_fp8_units", lambda device: capability >= 89),
        ):
            yield kernels
    finally:
        JITFunction.run = launch
        driver._active = active


class _Target:
    """What Triton asks a driver while it compiles.  Its name keeps compiled kernels of different targets apart."""

    def __init__(self, name: str, target: Any) -> None:
        self.get_current_device: Callable[[], str] = lambda: name
        self.get_current_target: Callable[[], Any] = lambda: target

    def get_current_stream(self, device: object) -> int:
        return 0


def compile_cases(module: str, capability: int) -> list[Any]:
    """Compile what ``tests.unit.kernels.<module>.launch_all`` launches, with the capability if it takes one; returns
    the kernels."""
    launch_all = importlib.import_module(f"tests.unit.kernels.{module}").launch_all
    with compiled_for(capability) as kernels:
        launch_all(**({"capability": capability} if "capability" in signature(launch_all).parameters else {}))
    assert kernels, f"{module} has launched nothing"
    for kernel in kernels:
        assert kernel.asm["cubin"], f"{kernel.name} has no machine code for sm_{capability}"
    return kernels
