"""The check of collectives: what is right passes, and planted faults are found and placed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tp_engine.apps.check.collectives import Way, check_collectives, check_speed
from tp_engine.apps.check.machine import check_copies
from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.distributed.collectives import Communicator

SIZES = (16, 4096)


class Host:
    """The messages of ranks that are threads."""

    def __init__(self, communicator: Communicator, posted: list[bytes], barrier: threading.Barrier) -> None:
        self.info = communicator.info
        self._posted, self._barrier = posted, barrier

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self._posted[self.info.rank] = payload
        self._barrier.wait()
        found = list(self._posted)
        self._barrier.wait()
        return found


def findings(num_ranks: int, break_it: Callable[[Communicator], None] = lambda right: None) -> list[list[CheckFinding]]:
    """What each of the ranks finds, whose communicators ``break_it`` has changed."""
    posted, barrier = [b""] * num_ranks, threading.Barrier(num_ranks, timeout=100)

    def on_rank(communicator: Communicator) -> list[CheckFinding]:
        break_it(communicator)
        host = Host(communicator, posted, barrier)
        way = Way(name="mine", communicator=communicator, host=host, device=torch.device("cpu"))
        return [*check_collectives(way, SIZES), check_speed(way, 4096)]

    return run_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_right_collectives_pass(num_ranks: int) -> None:
    """Oracle: the simulated communicator, whose sums are those of PyTorch in rank order; all ranks find the same."""
    found = findings(num_ranks)
    assert all([one.status for one in of_rank] == [CheckStatus.RIGHT] * 5 for of_rank in found)
    assert [one.name for one in found[0]] == [f"{kind}, mine" for kind in
        ("all_reduce", "tree_reduce", "all_gather", "gather")] + ["speed, mine"]  # fmt: skip
    assert found[0][-1].numbers["bus_gb_per_s"] > 0


def changing(kind: str, rank: int | None, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """A fault: ``kind`` returns something else, on one rank or on all."""

    def break_it(communicator: Communicator) -> None:
        right = getattr(communicator, kind)
        if rank in (None, communicator.info.rank):

            def wrong(*arguments: object) -> torch.Tensor | None:
                found = right(*arguments)
                return None if found is None else change(found.clone())

            setattr(communicator, kind, wrong)

    return break_it


def last_is_lost(found: torch.Tensor) -> torch.Tensor:
    found.view(-1)[-1] = 0.25
    return found


def swapped(found: torch.Tensor) -> torch.Tensor:
    return found.roll(found.shape[-1] // 2, -1)


def not_a_number(found: torch.Tensor) -> torch.Tensor:
    found.view(-1)[0] = float("nan")
    return found


@pytest.mark.parametrize("kind", ["all_reduce", "tree_reduce", "all_gather", "gather"])
@pytest.mark.parametrize("change", [last_is_lost, swapped, not_a_number])
def test_a_wrong_result_is_found_on_its_rank(kind: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Oracle: the rank and the kind that were broken; the other kinds are right."""
    rank = 0 if kind == "gather" else 2
    for of_rank in findings(4, changing(kind, rank, change)):
        wrong = [one for one in of_rank if one.status is CheckStatus.WRONG]
        assert [(one.name, one.place) for one in wrong] == [(f"{kind}, mine", f"rank {rank}")]
        assert "instead of" in wrong[0].detail and wrong[0].meaning and wrong[0].remedy


def test_other_bits_on_one_rank_are_found() -> None:
    """Oracle: rank 1 rounds once more, within the bound of sums: only the bits tell."""

    def break_it(communicator: Communicator) -> None:
        right = communicator.all_reduce

        def nudged(tensor: torch.Tensor) -> torch.Tensor:
            found = right(tensor)
            is_whole = bool((found == found.round()).all())
            return found if is_whole or communicator.info.rank != 1 else torch.nextafter(found, found * 2)

        communicator.all_reduce = nudged  # type: ignore[method-assign]

    (wrong,) = (one for one in findings(2, break_it)[0] if one.status is CheckStatus.WRONG)
    assert wrong.place == "rank 1" and "other bits than on rank 0" in wrong.detail


def test_a_sum_outside_of_the_types_bound_is_found() -> None:
    """Oracle: whole numbers stay exact and all ranks agree, but random sums are 4 roundings off."""

    def change(found: torch.Tensor) -> torch.Tensor:
        is_whole = bool((found == found.round()).all())
        return found if is_whole else found * (1 + 8 * torch.finfo(found.dtype).eps)

    (wrong,) = (one for one in findings(2, changing("all_reduce", None, change))[0] if one.status is CheckStatus.WRONG)
    assert "additions in this type explain an error of" in wrong.detail


def test_a_result_of_gather_on_another_rank_is_found() -> None:
    """Oracle: the interface: None on all ranks but 0."""

    def break_it(communicator: Communicator) -> None:
        communicator.gather = communicator.all_gather  # type: ignore[method-assign]

    (wrong,) = (one for one in findings(2, break_it)[1] if one.status is CheckStatus.WRONG)
    assert wrong.place == "rank 1" and "other than 0 has a result" in wrong.detail


def test_copies_between_devices() -> None:
    """Oracle: the bytes sent, between two names of the CPU; a pair for each direction."""
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    found = check_copies(devices, lambda device: None, num_bytes=1 << 16)
    assert found.status is CheckStatus.RIGHT and found.detail.startswith("2 pairs: ")
    assert all(speed > 0 for speed in found.numbers.values())
