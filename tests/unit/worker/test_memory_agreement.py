"""All ranks end with the same number of blocks or the same error (promise 12)."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.worker.memory_cases import SimulatedGroup, on_ranks
from tp_engine.errors import MemoryBudgetError
from tp_engine.job.topology import RankInfo
from tp_engine.worker.memory.meter import settle_slots


def agree(locals_: Sequence[int | Exception], of: str = "KV cache") -> list[Any]:
    """``settle_slots`` on one rank per entry, which chooses that number or raises that error."""

    def act(group: SimulatedGroup) -> int:
        def choose() -> int:
            own = locals_[group.info.rank]
            if isinstance(own, Exception):
                raise own
            return own

        return settle_slots(choose, group, of=of)

    return on_ranks(len(locals_), act)


@pytest.mark.parametrize("seed", range(10))
def test_agreement_is_the_minimum(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the minimum; in the log the maximum, and the first rank that has the minimum."""
    generator = random.Random(seed)
    blocks = [generator.choice([1, 5, 10**6, 2**40]) for _ in range(generator.randint(1, 8))]
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        assert agree(blocks) == [min(blocks)] * len(blocks)
    wanted = f"(limited by rank {blocks.index(min(blocks))}; the roomiest has {max(blocks)})"
    assert len(blocks) == 1 or wanted in caplog.text


def test_ranks_of_several_hosts_are_named_with_their_host() -> None:
    """Oracle: two ranks per host, numbered host by host; on one host the rank alone."""
    assert RankInfo(world_size=4, local_world_size=2).topology.named(3) == "rank 3 (host 1)"
    assert RankInfo(world_size=4, local_world_size=4).topology.named(3) == "rank 3"


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (0, "it counted 0 KV blocks"),
        (-3, "it counted -3 KV blocks"),
        (2**41, "it counted 2199023255552 KV blocks"),
        (2**70, "KV blocks"),
        (MemoryBudgetError("no memory is left"), "MemoryBudgetError: no memory is left"),
        (RuntimeError("CUDA error: ünïcode"), "RuntimeError: CUDA error: ünïcode"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_failure_is_everyones(bad: int | Exception, cause: str, rank: int) -> None:
    """Oracle: every rank has the same message with the rank and its cause; the failing rank keeps its own traceback."""
    locals_: list[int | Exception] = [100, 100, 100]
    locals_[rank] = bad
    results = agree(locals_)
    assert all(isinstance(result, MemoryBudgetError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert f"1 of 3 ranks could not provide a KV cache: rank {rank}: " in str(results[0])
    assert cause in str(results[0])
    if isinstance(bad, Exception):
        assert isinstance(results[rank], MemoryBudgetError) and results[rank].__cause__ is bad


def test_the_slots_of_a_host_tier_are_agreed_on_alike() -> None:
    """Oracle: the minimum, and the words for what could not be had."""
    assert agree([50, 40, 60], of="host tier") == [40, 40, 40]
    results = agree([50, MemoryBudgetError("too large"), 60], of="host tier")
    assert {str(result) for result in results} == {
        "1 of 3 ranks could not provide a host tier: rank 1: MemoryBudgetError: too large"
    }


def test_several_failures_are_all_named() -> None:
    """Oracle: the message names both failed ranks of four."""
    results = agree([5, ValueError("a"), 5, 0])
    assert all("2 of 4 ranks" in str(result) for result in results)
    assert all("rank 1: ValueError: a; rank 3: it counted 0" in str(result) for result in results)


def test_limiting_rank_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: rank 0 alone logs the minimum, the maximum and the rank that limits."""
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        agree([9, 4, 8])
    assert [record.getMessage() for record in caplog.records] == [
        "blocks of the KV cache: 4 on every rank (limited by rank 1; the roomiest has 9)"
    ]
