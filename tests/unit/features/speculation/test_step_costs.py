"""How many draft tokens pay, from measured times of decode steps."""

from __future__ import annotations

import numpy as np
import pytest

from tp_engine.features.speculation.step_costs import StepCosts


def costs(seconds: dict[int, float]) -> StepCosts:
    return StepCosts(tuple(seconds.items()))


@pytest.mark.parametrize(
    ("likelihoods", "expected"),
    [([0.9, 0.5, 0.1], 2), ([0.9, 0.9, 0.9], 3), ([0.05], 0), ([0.2], 1), ([], 0)],
)
def test_draft_tokens_pay_while_tokens_per_second_rise(likelihoods: list[float], expected: int) -> None:
    """Oracle: the table in the module's text, by hand: 10 s for a row and 1 s for each more."""
    found = costs({1: 10.0, 4: 13.0}).num_paying(1, np.array(likelihoods))
    assert found == expected


def test_a_small_model_verifies_less_than_a_large_one() -> None:
    """A step of 0.3 ms that a row more makes a third longer.  Oracle: by hand, the cost of verifying included."""
    tiny, large = costs({1: 3e-4, 8: 1e-3}), costs({1: 3e-2, 8: 3.3e-2})
    likelihoods = np.array([0.6, 0.36, 0.2, 0.15])
    assert tiny.num_paying(1, likelihoods) == 0
    assert large.num_paying(1, likelihoods) == 4


def test_draft_tokens_end_where_twice_the_rows_take_too_long() -> None:
    """Oracle: by hand: a draft token that is right every second time gives 1.5 times the tokens."""
    assert costs({1: 10.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 24.0, 32: 48.0}).most_decodes == 6
    assert costs({1: 10.0, 2: 20.0, 4: 40.0}).most_decodes == 1, "a row always gets a draft token if that one pays"
    assert costs({1: 10.0, 32: 12.0}).most_decodes == 16


def test_times_that_fall_are_noise() -> None:
    """Oracle: a step of more rows is never quicker, so the time of fewer rows counts."""
    assert costs({1: 10.0, 2: 9.0, 4: 9.5}).num_paying(1, np.array([0.1])) == 1


def test_likely_draft_tokens_are_verified_where_unlikely_ones_do_not_pay() -> None:
    """A model so small that a row more takes a third of a step, and draft tokens that a grammar forces.  Oracle: by
    hand: nine tokens for the time of 3.4 steps."""
    tiny = costs({1: 1.6e-4, 2: 1.8e-4, 4: 2.0e-4, 8: 3.5e-4, 16: 6.4e-4, 32: 1.2e-3})
    assert tiny.most_decodes == 3
    assert tiny.num_paying(1, np.full(8, 1.0)) == 8
    assert tiny.num_paying(1, np.array([0.3, 0.09, 0.03])) == 0


def test_a_heads_own_time_counts() -> None:
    """Oracle: by hand: a row takes 10 s and 1 s for each more; 1, 2, 3 drafts are right 9, 7.2, 5 times of 10."""
    measured, likelihoods = ((1, 10.0), (32, 41.0)), np.array([0.9, 0.72, 0.5])
    for seconds, expected in ((0.1, 3), (3.0, 2), (6.0, 1), (9.0, 0)):
        found = StepCosts(measured, ((1, seconds), (32, seconds))).num_drafts(1, likelihoods)
        assert found == expected, seconds
    dear = StepCosts(measured, ((1, 1.0), (16, 30.0)))
    assert [dear.num_drafts(rows, likelihoods) for rows in (1, 2, 4, 16)] == [3, 2, 1, 0]
    assert dear.most_decodes < StepCosts(measured).most_decodes
    assert StepCosts(measured).num_drafts(11, likelihoods) == 1, "there are times of 32 rows at most"
