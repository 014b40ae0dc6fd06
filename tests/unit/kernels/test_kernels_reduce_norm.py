"""The fused all-reduce, residual sum and norm: the interpreted kernel, and its compilation."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet


@needs_triton
def test_interpreted_kernel() -> None:
    """Oracle: float64; at most twice the error of a float32 sum and the norm's twin; signals as the protocol says."""
    interpreted("kernel_cases_reduce_norm")


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_for(capability: int) -> None:
    """Oracle: Triton's own compiler; ranks signal each other with the scope of the system, in order."""
    for kernel in compile_cases("kernel_cases_reduce_norm", capability):
        ptx = kernel.asm["ptx"]
        # Two meetings, each with one instruction for the signals to all peers and one for theirs.
        assert ptx.count("release.sys.cas") == ptx.count("acquire.sys.cas") == 2
        assert "global.b16" not in ptx, "rows are not read and written in vectors"
