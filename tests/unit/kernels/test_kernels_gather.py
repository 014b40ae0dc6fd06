"""The all-gather over shared memory: the interpreted kernel, and its compilation."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet
from tests.unit.kernels.test_kernels_early_start import in_order, instructions

MEETING = ("bar.sync", "release.sys.cas", "acquire.sys.cas", "bar.sync")
ORDER = ("ld.global", "st.global", *MEETING, "ld.global", "st.global", *MEETING)


@needs_triton
def test_interpreted_kernel() -> None:
    """Oracle: the parts, one behind the other, and signals as the protocol says; 2 and 4 ranks in processes that come
    at other times to each of several all-gathers, which share the buffers."""
    interpreted("kernel_cases_gather")


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_for(capability: int) -> None:
    """Oracle: Triton's own compiler: all threads copy, meet, one for each peer signals and then waits, all meet, read,
    and the same again; words of 8 bytes are read and written whole."""
    for kernel in compile_cases("kernel_cases_gather", capability):
        lines = instructions(kernel.asm["ptx"])
        assert in_order(lines, ORDER), f"{kernel.name} meets in another order"
        for kind in ("release", "acquire"):
            assert sum(f"{kind}.sys.cas" in line for line in lines) == 2
        narrow = [line for line in lines if ".global.b16" in line or ".global.b8" in line]
        assert not narrow, narrow
