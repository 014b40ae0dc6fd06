"""Ranks of one host share what Triton compiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernels.kernel_harness import needs_triton

pytestmark = needs_triton
NAME = "kernel.json"


class Rank:
    """One rank's end of Triton's cache, which the compiler asks before and tells after a compilation."""

    def __init__(self) -> None:
        from triton import knobs

        from tp_engine.kernels.compile_once_triton import compiling_once

        self.num_ready = 0
        before = knobs.cache.manager_class
        with compiling_once(self._note):
            self._cache: Any = knobs.cache.manager_class
        assert knobs.cache.manager_class == before

    def _note(self) -> None:
        self.num_ready += 1

    def find(self, key: str) -> Any:
        return self._cache(key).get_group(NAME)

    def store(self, key: str) -> None:
        cache = self._cache(key)
        cache.put_group(NAME, {NAME: cache.put("{}", NAME)})


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Rank, Rank, ThreadPoolExecutor]]:
    """Two ranks with one cache, and a thread for what may wait."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        yield Rank(), Rank(), pool


def test_one_compiles_and_the_other_waits(
    ranks: tuple[Rank, Rank, ThreadPoolExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: by hand.  What has been compiled is found without a turn; no lock stays in the folder."""
    first, second, pool = ranks
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        assert first.find("A") is None
        waiting = pool.submit(second.find, "A")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        assert second.num_ready == 0
        first.store("A")
        assert list(waiting.result(timeout=100)) == [NAME] == list(first.find("A"))
    assert (first.num_ready, second.num_ready) == (2, 1)
    assert any("waiting for the kernel kernel, made by process" in text for text in caplog.messages)
    assert not list(tmp_path.rglob("*.lock*"))


def test_different_kernels_at_the_same_time(ranks: tuple[Rank, Rank, ThreadPoolExecutor]) -> None:
    """Oracle: neither waits, or this test would."""
    first, second, _ = ranks
    assert first.find("A") is None and second.find("B") is None
    second.store("B")
    first.store("A")
    assert list(first.find("B")) == list(second.find("A")) == [NAME]


def test_a_fault_of_the_compiler_leaves_the_turn_to_the_next(ranks: tuple[Rank, Rank, ThreadPoolExecutor]) -> None:
    """Oracle: the other rank gets the same kernel to compile, and so meets the same fault."""
    first, second, pool = ranks
    assert first.find("A") is None  # raises in the compiler: nothing is stored
    waiting = pool.submit(second.find, "A")
    assert first.find("B") is None
    assert waiting.result(timeout=100) is None
