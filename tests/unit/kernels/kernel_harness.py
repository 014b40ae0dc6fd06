"""How Triton kernels are tested where there is no GPU.

* ``tests/interpreted`` runs the ``CASES`` of the modules ``kernel_cases_*`` in Triton's interpreter: the kernels'
  numbers on a CPU.  ``tests/gpu`` runs the same cases on CUDA.
* ``compiled_for(capability)`` turns every launch into a compilation for that GPU: call the host wrapper with tensors
  that resemble the engine's (on the meta device, of any size), and exactly the specialisation that the engine would
  launch is made into machine code.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from tp_engine.kernels import ops
from tp_engine.kernels.ops import has_triton
from tp_engine.system.units import KIB

# The tables of cases; a new one is found, and runs in the interpreter and on a GPU.
CASE_MODULES = sorted(
    path.stem.removeprefix("kernel_cases_") for path in Path(__file__).parent.glob("kernel_cases_*.py")
)
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


# What one program may use of a GPU's shared memory, by its compute capability (sm_86 and sm_89 have what sm_120 has).
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
Repeats = Literal["compile", "measure", "skip"]


@contextmanager
def compiled_for(capability: int, *, repeats: Repeats = "compile") -> Iterator[list[Any]]:
    """Inside, launches compile for a GPU of this capability (90: sm_90) and do not run; yields the compiled kernels.

    ``repeats`` are a kernel's launches with types of tensors that it has had before: they compile as the first one
    did, or until their shared memory is known (a third less work), or not at all.
    """
    from triton import knobs
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
        if types in by_types and repeats == "skip":
            return by_types[types]
        target.measures = types in by_types and repeats == "measure"
        with patch.object(knobs.runtime, "add_stages_inspection_hook", until_memory if target.measures else None):
            kernels.append(launch(self, *args, **(kwargs | {"warmup": True})))
        return by_types.setdefault(types, kernels[-1])

    target = _Target(f"sm_{capability}", GPUTarget("cuda", capability, 32))
    driver.set_active(target)
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


def until_memory(_backend: Any = None, stages: dict[str, Any] | None = None, *_: Any) -> tuple[str, str] | None:
    """A hook of Triton's compiler: no machine code is made.  Without arguments: what distinguishes such kernels."""
    if stages is None:
        return "memory", "memory"

    def name_it(_source: Any, metadata: dict[str, Any]) -> str:
        metadata["name"] = "measured"
        return ""

    stages["ptx"], stages["cubin"] = name_it, lambda _source, _metadata: b""
    return None


class _Target:
    """What Triton asks a driver while it compiles.  The device's name keeps compiled kernels of different targets
    apart, and those that are only measured."""

    def __init__(self, name: str, target: Any) -> None:
        self.measures = False
        self.get_current_device: Callable[[], str] = lambda: name + " measured" * self.measures
        self.get_current_target: Callable[[], Any] = lambda: target

    def get_current_stream(self, device: object) -> int:
        return 0


def launch_of(module: str, capability: int) -> None:
    """Launch what ``tests.unit.kernels.<module>.launch_all`` does, with the capability if it takes one."""
    launch_all = importlib.import_module(f"tests.unit.kernels.{module}").launch_all
    launch_all(**({"capability": capability} if "capability" in signature(launch_all).parameters else {}))


def compile_cases(module: str, capability: int, *, repeats: Repeats = "compile") -> list[Any]:
    """Compile what ``launch_of`` launches; returns the kernels, of which none needs more shared memory than the GPU
    has.  ``repeats``: see ``compiled_for``."""
    with compiled_for(capability, repeats=repeats) as kernels:
        launch_of(module, capability)
    assert kernels, f"{module} has launched nothing"
    for kernel in kernels:
        used, room = kernel.metadata.shared, SHARED_MEMORY[capability]
        assert used <= room, f"{kernel.src.name} needs {used:,} bytes of shared memory; an sm_{capability} has {room:,}"
        if kernel.name != "measured":
            assert kernel.asm["cubin"], f"{kernel.name} has no machine code for sm_{capability}"
    return kernels


def spilled_bytes(kernel: Any) -> int:
    """Return what each thread of a compiled kernel keeps in memory because its registers do not take it."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1])
