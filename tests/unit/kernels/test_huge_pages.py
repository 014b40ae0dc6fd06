"""Memory on huge pages: it is zero, tensors do not overlap, and the last tensor's end releases it."""

from __future__ import annotations

import gc
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tp_engine.kernels import huge_pages
from tp_engine.kernels.huge_pages import HUGE_PAGE, map_zeros, zeros


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_mapped_zeros(num_bytes: int) -> None:
    """Oracle: every byte is 0 and can be written; the first one begins a huge page."""
    room = map_zeros(num_bytes)
    assert room.shape == (num_bytes,) and room.data_ptr() % HUGE_PAGE == 0
    assert not room.any()
    room.fill_(7)
    assert bool((room == 7).all())


def test_tensors_share_pages_and_not_a_byte() -> None:
    """Oracle: each tensor keeps its own number, from several threads, and begins a cache line."""
    shapes = [(3, 5), (1000, 33), (1,), (700, 1024), (5_000_000,)] * 8

    def make(number: int) -> torch.Tensor:
        return zeros(shapes[number], torch.float32).fill_(number)

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(make, range(len(shapes))))
    for number, tensor in enumerate(made):
        assert tensor.shape == shapes[number] and tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_memory_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a weak reference to the mapping; the next tensor takes the rest of a mapping."""
    maps: list[weakref.ref[mmap.mmap]] = []
    real = huge_pages._map

    def noted(num_bytes: int) -> mmap.mmap:
        pages = real(num_bytes)
        maps.append(weakref.ref(pages))
        return pages

    monkeypatch.setattr(huge_pages, "_map", noted)
    monkeypatch.setattr(huge_pages, "_shelf", huge_pages._Shelf())
    first, second = zeros((10,), torch.float32), zeros((10,), torch.bfloat16)
    assert len(maps) == 1
    del first
    gc.collect()
    assert maps[0]() is not None
    del second
    gc.collect()
    assert maps[0]() is None
    assert not zeros((10,), torch.float32).any() and len(maps) == 2


def test_a_system_without_them_still_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the system refuses the advice."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert not map_zeros(2 * HUGE_PAGE).any()
