"""All-reduces through shared memory between real processes: sums are exact trees over the ranks; waits end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import fast_first
from tp_engine.cpu.library import native_library
from tp_engine.distributed.store import host_store

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0


def run_ranks(num_ranks: int, case: str) -> list[str]:
    """Each rank's printed line.  Some cases kill or stop rank 1; it is ended after the others."""
    store = host_store(timeout_s=60)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.exchange_job", *map(str, (rank, num_ranks, store.port)), case],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank in (0, *range(2, num_ranks), *([1] if case == "exact" else [])):
            ranks[rank].wait(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
    spoken = [process.communicate() for process in ranks]
    for rank, process in enumerate(ranks):
        assert process.returncode == 0 or (rank == 1 and case != "exact"), (rank, spoken[rank][1][-3000:])
    return [said.strip() for said, _ in spoken]


@pytest.mark.parametrize("num_ranks", fast_first(1, [2, 3]))
def test_sums_are_exact_and_equal(num_ranks: int) -> None:
    """Oracle: the parts gathered by gloo, added as a tree in float32 and rounded once.

    All ranks have the same bits, for every type and for sizes near those of vectors, slots and shots, also when each
    rank in turn comes late.
    """
    (digest,) = set(run_ranks(num_ranks, "exact"))
    assert len(digest) == 64, digest


def test_a_killed_rank_ends_the_wait() -> None:
    """Oracle: from then on every collective of the other ranks raises the health check's error, not a time-out."""
    assert run_ranks(3, "killed") == ["rank 1: its process is gone", "", "rank 1: its process is gone"]


@pytest.mark.slow
def test_a_collective_has_a_timeout() -> None:
    """Oracle: the error names the stopped rank and the limit; later collectives do not wait."""
    assert run_ranks(2, "asleep")[0] == "rank 1: did not come to a collective within 5 s"
