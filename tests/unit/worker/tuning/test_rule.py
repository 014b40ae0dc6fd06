"""The rule of choice: noise does not switch, a clear gain does, and equal candidates follow their table."""

from __future__ import annotations

import random

import pytest
import torch

from tp_engine.kernels.candidates import MANY, Choice
from tp_engine.worker.tuning import timing
from tp_engine.worker.tuning.rule import ROUNDS, drift, fastest, is_unsure, merge, without


def rounds(mean: float, seed: int, spread: float = 0.04) -> list[float]:
    """Times of ten rounds on a machine with noise, and now and then a round that is twice as long."""
    noise = random.Random(seed)
    return [mean * noise.gauss(1, spread) * (2 if noise.random() < 0.05 else 1) for _ in range(ROUNDS)]


def test_equal_candidates_do_not_switch() -> None:
    """Oracle: both have the same mean, in 400 starts; a fastest mean would switch in half of them."""
    switched = sum(
        fastest({"own": rounds(1, 2 * seed), "other": rounds(1, 2 * seed + 1)}, "own") == "other" for seed in range(400)
    )
    assert switched <= 8


def test_a_clear_gain_is_taken() -> None:
    """Oracle: 20 % less in each of 100 starts, and an outlier; the order of the table does not matter."""
    taken = sum(
        fastest({"own": rounds(1, 2 * seed), "other": rounds(0.8, 2 * seed + 1)}, "own") == "other"
        for seed in range(100)
    )
    assert taken >= 95
    assert fastest({"other": [0.8] * 9 + [3.0], "own": [1.0] * 10}, "own") == "other"


def test_ties_follow_the_table() -> None:
    """Oracle: by hand, both are within 3 % of the fastest; without a right default too."""
    times = {"own": [1.0] * 10, "first": [0.51] * 10, "second": [0.50] * 10, "third": [0.4] * 10}
    assert fastest(times, "own") == "third"
    del times["third"]
    assert fastest(times, "own") == "first"
    del times["own"]
    assert fastest(times, None) == "first"


def test_more_rounds_where_a_median_alone_says_faster() -> None:
    """Oracle: by hand, 7 of 10 rounds are below 0.97."""
    times = {"own": [1.0] * 10, "other": [0.9] * 7 + [1.0] * 3}
    assert is_unsure(times, "own") and fastest(times, "own") == "own"
    assert not is_unsure({"own": [1.0] * 10, "other": [0.9] * 10}, "own")
    assert fastest({"own": [0.0] * 10, "other": [0.0] * 10}, "own") == "own"  # a clock that stands still


def test_a_drift_asks_for_more() -> None:
    """Oracle: by hand.  The default takes 20 % longer at the end, so that a gain of 10 % may be the clock's, and one of
    half is none of it; without a drift both are gains."""
    moved = [1.0] * 5 + [1.2] * 5
    assert drift({"own": moved}, "own") == pytest.approx(0.2) and drift({"own": [1.0, 1.02] * 5}, "own") == 0
    assert drift({"own": moved[:3]}, "own") == drift({"own": moved}, None) == 0
    for gain, taken in ((0.9, "own"), (0.5, "other")):
        assert fastest({"own": moved, "other": [gain * one for one in moved]}, "own") == taken
        assert fastest({"own": [1.0] * 10, "other": [gain] * 10}, "own") == "other"


def test_a_drift_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the rounds of a clock by hand, whose first ten rounds drift."""
    now = iter([1.0] * 5 + [1.5] * 5 + [2.0] * 10)
    monkeypatch.setattr(timing, "_thread_clock", lambda copies, inputs: lambda: next(now))
    times = timing.time_rounds({"own": []}, [], torch.device("cpu"), "own", lambda name: None)
    assert times == {"own": [2.0] * 10}


OWN: Choice = ((4, "few"), (32, "some"), (MANY, "many"))


@pytest.mark.parametrize(
    ("winners", "expected"),
    [
        ({1: None, 8: None, 64: None}, OWN),
        ({1: None, 8: "fast", 64: None}, ((1, "few"), (8, "fast"), (32, "some"), (MANY, "many"))),
        ({1: "fast", 8: "fast", 64: "fast"}, ((MANY, "fast"),)),
        ({1: "fast", 64: None}, ((1, "fast"), (4, "few"), (32, "some"), (MANY, "many"))),
        ({1: None, 4: None, 64: "some"}, ((4, "few"), (MANY, "some"))),
    ],
)
def test_winners_of_sizes_become_lines(winners: dict[int, str | None], expected: Choice) -> None:
    """Oracle: by hand; a size stands for smaller ones, the largest for all above it."""
    assert merge(OWN, winners) == expected


def test_what_is_not_right_is_replaced() -> None:
    """Oracle: by hand; one of more rows stands in, or else of fewer, and what has no other stays to be refused."""
    assert without(OWN, {"some", "many"}) == ((32, "some"), (MANY, "many"))
    assert without(OWN, {"few"}) == ((MANY, "few"),)
    assert without(OWN, set()) == OWN
