"""The kernels of the modules ``kernel_cases_*`` compiled for GPUs, as the engine launches them there.

Compiling takes most of these tests' time, so one test checks everything about a module's kernels.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import slow_but
from tests.unit.kernels.kernel_harness import compile_cases, needs_triton, quiet
from tests.unit.kernels.ptx import JOINING, check_early_start, check_joins, has_atomics, read_from

pytestmark = [needs_triton, quiet]
MODULES = sorted(
    path.stem for path in Path(__file__).parent.glob("kernel_cases_*.py") if "def launch_all" in path.read_text("utf-8")
)
# GPUs from compute capability 8.9 on have e4m3; on others no product reads codes.
NEEDS_E4M3 = ("kernel_cases_norm_codes",)
# Modules with kernels of which the last program joins the parts of all.
JOINS = ("kernel_cases_latents", "kernel_cases_paged_attention", "kernel_cases_sampling")
# Modules whose kernels may need more shared memory than a GPU has.
CHECK_MEMORY = ("kernel_cases_latents", "kernel_cases_paged_attention")

# Most of the time; ``test_kernels_specialisations`` and ``test_kernels_latents`` compile the usual launches of these in
# the fast tier, too.
MANY_LAUNCHES = {f"kernel_cases_{name}" for name in ("experts", "heads", "latents", "paged_attention")}


def compile_and_check(name: str, capability: int, *, once: bool = False) -> list[Any]:
    """The module's kernels, checked by its ``check_compiled`` if it has one."""
    kernels = compile_cases(name, capability, once=once)
    module = importlib.import_module(f"tests.unit.kernels.{name}")
    for kernel in kernels if hasattr(module, "check_compiled") else ():
        module.check_compiled(kernel, capability)
    return kernels


@pytest.mark.parametrize("module", slow_but(set(MODULES) - MANY_LAUNCHES, MODULES))
def test_kernels_of_sm_90(module: str) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; the module's rules, and those of ``ptx``."""
    kernels = compile_and_check(module, 90)
    for kernel in kernels:
        check_early_start(kernel)
    if module in JOINS:
        joining = [kernel for kernel in kernels if kernel.name in JOINING and has_atomics(kernel)]
        assert joining
        for kernel in joining:
            check_joins(kernel)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("module", MODULES)
def test_kernels_of_other_gpus(module: str, capability: int) -> None:
    """Oracle: Triton's own compiler, and the module's rules.  A GPU decides about instructions for types and about
    shared memory, so each kernel compiles once for its types, and for all launches where its memory is checked."""
    if capability >= 89 or module not in NEEDS_E4M3:
        compile_and_check(module, capability, once=module not in CHECK_MEMORY)


@pytest.mark.slow
def test_attention_of_sm_89() -> None:
    """Oracle: as above; no other GPU has as little shared memory for 8-bit floats."""
    compile_and_check("kernel_cases_paged_attention", 89)


def test_registers_are_followed_to_their_parameter() -> None:
    """Oracle: a few lines by hand: an address is the sum of a pointer and an offset that another parameter gives."""
    lines = [
        "ld.param.b64 %rd1, [a_kernel_param_0];",
        "ld.param.b64 %rd2, [a_kernel_param_1];",
        "ld.param.b32 %r1, [a_kernel_param_2];",
        "mul.wide.s32 %rd3, %r1, 2;",
        "add.s64 %rd4, %rd2, %rd3;",
        "ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];",
    ]
    assert read_from(lines, ["x", "weight", "stride"]) == {"weight", "stride"}
    assert read_from(lines[:5], ["x", "weight", "stride"]) == set()
