"""The kernels of the modules ``kernel_cases_*`` compiled for GPUs, as the engine launches them there.

Compiling takes most of these tests' time, so one test checks everything about a module's kernels.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import slow_but
from tests.unit.kernels import kernel_cases_gather
from tests.unit.kernels.kernel_cases_candidates import CPU, OF_PACKAGES, SHAPES
from tests.unit.kernels.kernel_harness import (
    SHARED_MEMORY,
    Repeats,
    compile_cases,
    compiled_for,
    launch_of,
    needs_triton,
    quiet,
)
from tests.unit.kernels.ptx import JOINING, check_early_start, check_joins, has_atomics, read_from
from tp_engine.kernels.candidates import CANDIDATES, operation, why_no_triton

pytestmark = [needs_triton, quiet]
ROOT = Path(__file__).parents[3]
MODULES = sorted(
    path.stem for path in Path(__file__).parent.glob("kernel_cases_*.py") if "def launch_all" in path.read_text("utf-8")
)
# Operations with candidates that only CPUs have.
ONLY_ON_CPUS = {"int8_linear"}
# GPUs from compute capability 8.9 on have e4m3; on others no product reads codes.
NEEDS_E4M3 = ("kernel_cases_norm_codes",)
# Modules with kernels of which the last program joins the parts of all.
JOINS = tuple(f"kernel_cases_{name}" for name in ("index_keys", "latents", "paged_attention", "sampling"))
# Modules with products: how much shared memory their kernels need depends on their tiles, so on each launch.
ATTENTION = {"kernel_cases_index_keys", "kernel_cases_latents", "kernel_cases_paged_attention"}
PRODUCTS = ATTENTION | {
    f"kernel_cases_{name}" for name in ("adapters", "candidates", "experts", "quantised", "tree_linear")
}

# Modules without products that take long to compile.  sm_100 has reductions of its own; on sm_120 the instructions of
# these are those of sm_90 and sm_100: reductions, atomics and conversions, which other modules compile for sm_120.
AS_ON_SM_100 = {"kernel_cases_heads", "kernel_cases_sampling"}

# Most of the time; ``test_kernels_specialisations`` and ``test_kernels_latents`` compile the usual launches of most of
# these in the fast tier, too.
MANY_LAUNCHES = {
    f"kernel_cases_{name}"
    for name in (
        "adapters",
        "candidates",
        "experts",
        "heads",
        "index_keys",
        "latents",
        "paged_attention",
        "quantised",
    )
}


def compile_and_check(name: str, capability: int, *, repeats: Repeats = "compile") -> list[Any]:
    """The module's kernels, checked by its ``check_compiled`` if it has one, and their shared memory.

    Where a tile does not fit into tensor memory, the compiler writes a trap, which would end the process."""
    kernels = compile_cases(name, capability, repeats=repeats)
    trapped = [kernel.name for kernel in kernels if "trap;" in kernel.asm.get("ptx", "")]
    assert not trapped, f"kernels that only trap on sm_{capability}: {trapped}"
    module = importlib.import_module(f"tests.unit.kernels.{name}")
    for kernel in kernels if hasattr(module, "check_compiled") else ():
        if kernel.name != "measured":
            module.check_compiled(kernel, capability)
    return kernels


def test_every_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the kernels in the package's files.  Modules of cases launch each of them, so that it is compiled here,
    and runs in the interpreter and in the first call of scripts/gpu_check on a GPU."""
    from triton.runtime.jit import JITFunction

    launched: set[tuple[str, str]] = set()
    with compiled_for(90), monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda self, *_, **__: launched.add((self.fn.__module__, self.__name__)))
        for name in MODULES:
            launch_of(name, 90)
    declared = set()
    for path in (ROOT / "tp_engine").rglob("*_triton.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                declared.add((module, node.name))
    assert launched == declared


@pytest.mark.parametrize("name", sorted(CANDIDATES.keys() - ONLY_ON_CPUS))
def test_every_candidate_has_a_case(name: str) -> None:
    """Oracle: the table.  Each candidate that a GPU may have is proven for a shape of ``kernel_cases_candidates``, in
    the interpreter and in the first call of scripts/gpu_check; those of packages have tests with stand-ins."""
    shapes = [shape for one, shape, _ in SHAPES.values() if one == name]
    for candidate in operation(name).candidates:
        reasons = [candidate.why_not(shape, CPU) for shape in shapes]
        is_tried = None in reasons or any(reason == why_no_triton(shapes[0], CPU) for reason in reasons)
        assert is_tried or candidate.name in OF_PACKAGES, (candidate.name, reasons)


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
@pytest.mark.parametrize(
    ("module", "capability"),
    [(name, one) for name in MODULES for one in ((80, 100) if name in AS_ON_SM_100 else (80, 100, 120))],
)
def test_kernels_of_other_gpus(module: str, capability: int) -> None:
    """Oracle: Triton's own compiler, and the module's rules.  A GPU decides about instructions for types and about
    shared memory, so each kernel compiles once for its types.  Where tiles differ, the other launches go as far as
    their memory is known: those of all products where it is least, on sm_120, elsewhere those of attention.  An sm_120
    stands for sm_86 and sm_89, whose kernels need the same.  What is compiled for sm_100 alone fits sm_120's memory."""
    if capability >= 89 or module not in NEEDS_E4M3:
        measured = PRODUCTS if capability == 120 else ATTENTION
        kernels = compile_and_check(module, capability, repeats="measure" if module in measured else "skip")
        if module in AS_ON_SM_100:
            assert max(kernel.metadata.shared for kernel in kernels) <= SHARED_MEMORY[120]


def test_shared_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same launch with machine code; what needs more than the GPU has is refused by name."""
    with compiled_for(120, repeats="measure") as kernels:
        for _ in range(2):
            kernel_cases_gather.launch_all()
    compiled, measured = kernels[0], kernels[len(kernels) // 2]
    assert measured.metadata.shared == compiled.metadata.shared > 1000
    assert compiled.asm["cubin"] and measured.name == "measured"
    monkeypatch.setitem(SHARED_MEMORY, 120, 1000)
    with pytest.raises(AssertionError, match=r"kernel needs [\d,]+ bytes of shared memory; an sm_120 has 1,000"):
        compile_cases("kernel_cases_gather", 120)


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
