"""The statistics of the gates, beside published values and draws of which the truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tp_engine.apps.gates.statistics import LEVEL, paired_p, ratio_interval, share_interval, t_quantile


@pytest.mark.parametrize(
    ("num_right", "num_asked", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval(num_right: int, num_asked: int, low: float, high: float) -> None:
    """Oracle: the score intervals in Newcombe, Statistics in Medicine 17 (1998) 857, table I."""
    found = share_interval(num_right, num_asked)
    assert found.estimate == num_right / num_asked
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_intervals_of_shares_hold_their_level() -> None:
    """Oracle: the binomial distribution: the chance that the interval holds the true share, over true shares."""
    num = 40
    intervals = [share_interval(right, num) for right in range(num + 1)]
    chances = [
        sum(
            math.comb(num, right) * share**right * (1 - share) ** (num - right)
            for right, one in enumerate(intervals)
            if one.low <= share <= one.high
        )
        for share in np.linspace(0.02, 0.98, 49)
    ]
    assert LEVEL - 0.01 < float(np.mean(chances)) < LEVEL + 0.02


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (8, 2.306), (30, 2.042), (1000, 1.962)]
)
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    """Oracle: the printed tables of Student's distribution, at 97.5 %."""
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


def test_the_paired_test() -> None:
    """Oracle: sums of binomial coefficients by hand; nothing changed, or as much each way, tells nothing."""
    assert paired_p(10, 2) == paired_p(2, 10) == 2 * (1 + 12 + 66) / 4096
    assert paired_p(5, 0) == 2 / 32
    assert paired_p(0, 0) == paired_p(7, 7) == 1


def test_ratios_of_noisy_figures_hold_their_level() -> None:
    """Oracle: draws with a known ratio, and more noise in one figure than in the other."""
    rng, truth, held = np.random.default_rng(64), 0.9, 0
    for _ in range(300):
        before, now = 100 * rng.lognormal(0, 0.02, 5), 90 * rng.lognormal(0, 0.06, 5)
        found = ratio_interval(before.tolist(), now.tolist())
        held += found.low <= truth <= found.high
    assert 0.91 * 300 < held < 0.99 * 300


def test_a_ratio_does_not_depend_on_which_is_on_top() -> None:
    """Oracle: the inverse; without noise the interval has no width."""
    one, other = [100.0, 103.0, 98.0], [91.0, 90.0]
    there, back = ratio_interval(one, other), ratio_interval(other, one)
    assert (there.estimate, there.low, there.high) == pytest.approx((1 / back.estimate, 1 / back.high, 1 / back.low))
    assert ratio_interval([100.0, 100.0], [95.0, 95.0]) == pytest.approx((0.95, 0.95, 0.95))
