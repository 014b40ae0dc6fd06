"""Guards around what a library allocates, on a GPU and with torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, no_type_check

import pytest
import torch
import torch.nn.functional as F

from tp_engine.kernels.jit import jit
from tp_engine.worker.tuning.guards import Guards
from tp_engine.worker.tuning.proof import record

tl: Any = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Below and above what the allocator keeps in pieces of other kinds: 1 MiB and 10 MiB.
SIZES = [1000, 300_000, 3 << 20]


@jit
@no_type_check
def fill_kernel(out, first, count, block: tl.constexpr):
    """Write ones at the elements from ``first`` on."""
    place = first + tl.arange(0, block)
    tl.store(out + place, place * 0.0 + 1.0, mask=place < first + count)


def product(size: int, first: int, count: int) -> Callable[[], torch.Tensor]:
    """A library's function, which makes ``size`` float32 and writes some of them, or others."""

    def call() -> torch.Tensor:
        made = torch.empty(size, dtype=torch.float32, device="cuda")
        fill_kernel[(1,)](made, first, count, block=16)
        return made

    return call


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("first", "count", "is_right"), [(0, 8, True), (-4, 4, False)])
def test_what_lies_beside_an_output(size: int, first: int, count: int, is_right: bool) -> None:
    """Oracle: what is written: the first elements, or those before them."""
    guards, call = Guards(torch.device("cuda")), product(size, first, count)
    guards.between_neighbours(call, torch.empty(size, dtype=torch.float32, device="cuda"))
    assert guards._neighbours, "the allocator put it elsewhere"
    if is_right:
        guards.check()
    else:
        with pytest.raises(ValueError, match="a library that it calls writes outside"):
            guards.check()


@pytest.mark.parametrize("size", SIZES)
def test_behind_an_output(size: int) -> None:
    """Oracle: a write behind the last piece of 512 bytes, in a CUDA graph that is replayed."""
    whole = -(-size * 4 // 512) * 128
    guards, call = Guards(torch.device("cuda")), product(size, whole, 2)
    graph, _ = record(lambda: (guards.between_neighbours(call, torch.empty(size, dtype=torch.float32, device="cuda")),))
    graph.replay()
    torch.cuda.synchronize()
    assert guards._neighbours
    with pytest.raises(ValueError, match="a library that it calls writes outside"):
        guards.check()


def test_pytorch_s_products_are_right() -> None:
    """Oracle: the product outside of guards; its memory is between them, and they are as they were."""
    x, weight = (torch.randn(33, 64, device="cuda") for _ in range(2))
    expected = F.linear(x, weight)
    with Guards(torch.device("cuda")) as guards:
        found = F.linear(x, weight)
    guards.check()
    assert torch.equal(found, expected) and len(guards._neighbours) == 2
