"""Ranks that make one engine together: threads stand for their processes here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.patience import on_this_machine
from tp_engine.api import team_ranks
from tp_engine.api.team_ranks import FirstRank, OtherRank, TeamRank

LIMIT_S = 30.0


class StruckError(BaseException):
    """As an exception from outside."""


class Ranks:
    """A team of three, each in a thread of its own."""

    def __init__(self) -> None:
        first = FirstRank(3)
        self.ranks: list[TeamRank] = [first, *(OtherRank(place, first.address) for place in (1, 2))]
        first.meet()
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]

    def begin(
        self, place: int, work: Callable[[], Any], *, method: str = "generate", meanwhile: Callable[[], object] = list
    ) -> Future[Any]:
        return self._threads[place].submit(self.ranks[place].do, method, work, meanwhile)

    def call(self, work: Callable[[], Any], places: tuple[int, ...] = (0, 1, 2), **named: Any) -> list[Any]:
        """What each of ``places`` gets, results and errors."""
        begun = [self.begin(place, work, **named) for place in places]
        return [one.exception(on_this_machine(LIMIT_S)) or one.result() for one in begun]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture
def team() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def words(errors: list[Any]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_the_first_rank_works_for_all(team: Ranks) -> None:
    """Oracle: one call, one outcome everywhere, of any size; an error of the work is every rank's."""
    numbers = iter(range(9))
    assert team.call(lambda: f"{next(numbers)}" * 3_000_000) == ["0" * 3_000_000] * 3 and next(numbers) == 1
    assert words(team.call(raising(ValueError("bad prompt")))) == ["ValueError: bad prompt"] * 3
    assert team.call(lambda: 7) == [7] * 3


def test_what_cannot_be_sent_is_told_in_words(team: Ranks) -> None:
    """Oracle: the first rank has the object itself; the others have its words, and the next outcome."""

    class OwnError(Exception):
        pass

    assert words(team.call(raising(OwnError("too late"))))[0] == "OwnError: too late"
    lock, *others = team.call(threading.Lock)
    assert hasattr(lock, "acquire") and all("cannot be sent" in one for one in words(others))
    assert team.call(lambda: 7) == [7] * 3


def test_a_rank_that_is_struck_in_a_call_holds_up_nobody(team: Ranks) -> None:
    """Oracle: its exception is its own; the others have their outcome while it is away; the next call is whole."""
    begun = [team.begin(place, lambda: 5) for place in (0, 2)]
    struck = team.begin(1, lambda: 5, meanwhile=raising(StruckError("struck")))
    assert isinstance(struck.exception(LIMIT_S), StruckError)
    assert [one.result(LIMIT_S) for one in begun] == [5, 5]
    assert team.call(lambda: 7) == [7] * 3


def test_a_first_rank_that_is_struck_tells_the_others(team: Ranks) -> None:
    """Oracle: its exception is its own; they are told in which call; the next call is whole."""
    own, *others = team.call(raising(StruckError("struck")), method="chat")
    assert isinstance(own, StruckError)
    assert words(others) == ["RuntimeError: the first rank of the team was interrupted in chat (its call 1)"] * 2
    assert team.call(lambda: 7) == [7] * 3


def test_ranks_that_are_out_of_step_are_told(team: Ranks) -> None:
    """Oracle: the rank that makes another call is told at once, all are at the next one, and none waits for ever."""
    begun = [team.begin(place, lambda: 5) for place in (0, 1)]
    other = team.begin(2, lambda: 5, method="sleep")
    assert [one.result(LIMIT_S) for one in begun] == [5, 5]
    said = "the ranks of the team are out of step"
    theirs = f"RuntimeError: {said}: sleep (its call 1) on rank 2 is generate on rank 0; close the engine on all ranks"
    assert words([other.exception(LIMIT_S)]) == [theirs]
    for _ in range(2):
        assert all(said in one and "sleep" in one for one in words(team.call(lambda: 7)))


def test_a_rank_that_leaves_is_missed_at_once(team: Ranks) -> None:
    """Oracle: the others' next call but one says who has left; so does a call whose first rank leaves meanwhile."""
    assert team.call(lambda: 7) == [7] * 3
    team.ranks[1].close()
    team.call(lambda: 7, (0, 2))  # it may come before the news
    assert all("rank 1 of the team has left" in one for one in words(team.call(lambda: 7, (0, 2))))
    waiting = team.begin(2, lambda: 7)
    team.ranks[0].close()
    assert "the first rank of the team has left" in words([waiting.exception(LIMIT_S)])[0]


def test_who_waits_for_others_says_so(
    team: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: warnings of a first rank that is a call ahead, and of another rank that is."""
    monkeypatch.setattr(team_ranks, "_TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(team_ranks, "_NAP_S", 0.01)
    with caplog.at_level(logging.WARNING):
        assert team.call(lambda: 7, (0,)) == [7]
        ahead = team.begin(0, lambda: 8)
        while "waiting for other ranks of the team to begin call 1" not in caplog.text:
            assert not ahead.done()
        assert team.call(lambda: 7, (1, 2)) == [7, 7]
        assert [ahead.result(LIMIT_S), *team.call(lambda: 8, (1, 2))] == [8] * 3
        early = team.begin(1, lambda: 9)
        while "waiting for the first rank of the team to begin generate (its call 3)" not in caplog.text:
            assert not early.done()
        assert [*team.call(lambda: 9, (0, 2)), early.result(LIMIT_S)] == [9] * 3
