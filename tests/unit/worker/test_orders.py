"""Orders: all ranks follow or none, whatever fails; ranks are threads here.  Real ranks: tests/ranks/test_orders.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fake_engine import FakeEngine
from tp_engine.engine.admin_commands import ADMIN_COMMANDS, act
from tp_engine.errors import RequestError
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.plan import Order
from tp_engine.worker.orders import Outcome, Prepared, execute_command

NUM_RANKS = 3


class Group:
    """``HostGroup`` for threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=100)
        self.payloads: list[bytes] = [b""] * size


class Member:
    """One rank's end of it."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self.group.payloads[self.rank] = payload
        self.group.barrier.wait()
        found = list(self.group.payloads)
        self.group.barrier.wait()  # before the next call changes them
        return found


def note(rank: int, arguments: Mapping[str, Any], diary: list[str]) -> Prepared:
    """Prepare an order that notes what becomes of it."""
    if rank in arguments["failing"]:
        raise ValueError(f"cannot {arguments['what']}")

    def commit() -> dict[str, Any]:
        diary.append(f"commit {rank}")
        return {"rank": rank}

    return Prepared(commit, lambda: diary.append(f"discard {rank}"))


def run(failing: list[int]) -> tuple[list[Outcome], list[str], list[RankPhase]]:
    """The outcome on every rank, what was done, and the phase of each rank afterwards."""
    diary: list[str] = []

    group, outcomes = Group(NUM_RANKS), [Outcome("", {})] * NUM_RANKS
    progresses = [RankProgress() for _ in range(NUM_RANKS)]
    data = msgspec.json.encode(Order("note", {"failing": failing, "what": "read"}))

    def rank(number: int) -> None:
        info = SimpleNamespace(is_first=number == 0)
        groups: Any = SimpleNamespace(host=Member(group, number), progress=progresses[number], info=info)
        outcomes[number] = execute_command(data, {"note": lambda arguments: note(number, arguments, diary)}, groups)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    return outcomes, sorted(diary), [progress.phase for progress in progresses]


def test_all_ranks_commit() -> None:
    """By hand: each rank commits once, and has its own result."""
    outcomes, diary, phases = run(failing=[])
    assert outcomes == [Outcome("", {"rank": rank}) for rank in range(NUM_RANKS)]
    assert diary == ["commit 0", "commit 1", "commit 2"] and phases == [RankPhase.COMMIT] * NUM_RANKS


@pytest.mark.parametrize(("failing", "kept"), [([1], [0, 2]), ([0], [1, 2]), ([1, 2], [0]), ([0, 1, 2], [])])
def test_one_that_can_not_stops_all(failing: list[int], kept: list[int]) -> None:
    """By hand: all ranks have the same outcome, which names the first that failed; those that could free what they
    have."""
    outcomes, diary, phases = run(failing)
    assert outcomes == [Outcome(f"rank {failing[0]}: ValueError: cannot read", {})] * NUM_RANKS
    assert diary == [f"discard {rank}" for rank in kept] and phases == [RankPhase.PREPARE] * NUM_RANKS


def alone(order: str, orders: dict[str, Any]) -> Outcome:
    """Follow an order on one rank."""
    host: Any = SimpleNamespace(all_gather_bytes=lambda payload: [payload])
    groups: Any = SimpleNamespace(host=host, progress=RankProgress(), info=SimpleNamespace(is_first=True))
    return execute_command(msgspec.json.encode(Order(order, {})), orders, groups)


def test_an_unknown_order_is_refused() -> None:
    """Oracle: the promise; no rank ends."""
    assert "KeyError" in alone("fly", {}).refusal


def test_a_failure_that_no_encoding_can_write_is_a_refusal() -> None:
    """Oracle: the promise; names of files and tensors may have half a surrogate pair."""

    def fail(arguments: object) -> Prepared:
        raise OSError("no tensor \ud800")

    assert alone("read", {"read": fail}).refusal == "rank 0: OSError: no tensor ?"


def test_a_user_s_fault_is_told_in_its_own_words() -> None:
    """By hand: the message stands behind the rank, without the error's name in Python."""

    def refuse(arguments: object) -> Prepared:
        raise RequestError("it cannot sleep; leave the tier out")

    assert alone("sleep", {"sleep": refuse}).refusal == "rank 0: it cannot sleep; leave the tier out"


def test_an_unknown_act_is_refused_with_those_that_are_known() -> None:
    """Oracle: the table."""
    with pytest.raises(RequestError, match=r"'fly' is nothing that an engine can do; it can describe, .*profile"):
        act(FakeEngine().operator, "fly", {})


def _undocumented(table: Mapping[str, Callable[..., Any]]) -> list[str]:
    return [name for name, function in table.items() if not function.__doc__]


def test_acts_say_what_they_do() -> None:
    """Oracle: the rule: each act has a docstring."""
    assert not _undocumented(ADMIN_COMMANDS)
