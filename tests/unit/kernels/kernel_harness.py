"""How Triton kernels are tested where there is no GPU.

* ``tests/interpreted`` runs the ``CASES`` of the modules ``kernel_cases_*`` in Triton's interpreter: the kernels'
  numbers on a CPU.  ``tests/gpu`` runs the same cases on CUDA.
* ``compiled_for(capability)`` turns every launch into a compilation for that GPU: call the host wrapper with tensors
  that resemble the engine's (on the meta device, of any size), and exactly the specialisation that the engine would
  launch is made into machine code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tp_engine.kernels import ops
from tp_engine.kernels.ops import has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
# Triton warns of its own environment variable while it compiles for some targets.
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


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


@contextmanager
def compiled_for(capability: int, *, once: bool = False) -> Iterator[list[Any]]:
    """Inside, launches compile for a GPU of this capability (90: sm_90) and do not run; yields the compiled kernels.

    With ``once``, each kernel compiles for the first launch with each combination of types of tensors.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tp_engine.kernels import dependent_launch_triton
    from tp_engine.kernels.quantization import values_triton

    kernels: list[Any] = []
    launch, active = JITFunction.run, driver._active  # without a GPU, asking for the active driver fails

    by_types: dict[tuple[object, ...], Any] = {}

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        types = (self.fn, *(one.dtype for one in given if isinstance(one, torch.Tensor)))
        if once and types in by_types:
            return by_types[types]
        kernels.append(launch(self, *args, **(kwargs | {"warmup": True})))
        by_types[types] = kernels[-1]
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


def compile_cases(module: str, capability: int, *, once: bool = False) -> list[Any]:
    """Compile what ``tests.unit.kernels.<module>.launch_all`` launches, with the capability if it takes one; returns
    the kernels.  ``once``: see ``compiled_for``."""
    launch_all = importlib.import_module(f"tests.unit.kernels.{module}").launch_all
    with compiled_for(capability, once=once) as kernels:
        launch_all(**({"capability": capability} if "capability" in signature(launch_all).parameters else {}))
    assert kernels, f"{module} has launched nothing"
    for kernel in kernels:
        assert kernel.asm["cubin"], f"{kernel.name} has no machine code for sm_{capability}"
    return kernels
