"""The few statistics of the gates, each with its source; ``LEVEL`` of their intervals hold the true value.

They need no package: the sizes are small, and every formula is a few lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95


class Interval(NamedTuple):
    """An estimate, and the bounds between which the true value lies at ``LEVEL``."""

    estimate: float
    low: float
    high: float


def share_interval(num_right: int, num_asked: int) -> Interval:
    """Return the share of right answers with Wilson's score interval.

    Questions are a sample: of other questions of the same kind a model would answer another share right.  Wilson's
    interval holds its level for few questions and for shares near 0 and 1, where the share plus or minus its standard
    error leaves the range or has no width.  E. B. Wilson, Probable inference, the law of succession, and statistical
    inference, JASA 22 (1927) 209; recommended by Brown, Cai and DasGupta, Statistical Science 16 (2001) 101.
    """
    z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    share, scale = num_right / num_asked, 1 + z * z / num_asked
    middle = (share + z * z / (2 * num_asked)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_asked + z * z / (4 * num_asked * num_asked))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def paired_p(num_lost: int, num_won: int) -> float:
    """Return the probability of a split at least as uneven of the questions whose answers changed, if neither run were
    better: McNemar's test in its exact form.

    Both runs answer the same questions, so the questions that both answer right, or both wrong, tell nothing about a
    difference.  Of ``num_lost`` (right only before) and ``num_won`` (right only now) each is as likely as the other
    without one, which makes their split binomial.  Q. McNemar, Psychometrika 12 (1947) 153; the exact form: A. Agresti,
    Categorical Data Analysis, chapter 11.
    """
    num_changed, fewer = num_lost + num_won, min(num_lost, num_won)
    tail = sum(math.comb(num_changed, count) for count in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**num_changed))


def ratio_interval(before: Sequence[float], now: Sequence[float]) -> Interval:
    """Return the ratio of two positive figures, ``now`` over ``before``, from at least two repeats of each.

    The figures' logarithms are compared by Welch's interval, which lets the two have different noise, and the
    difference becomes a ratio: a machine's noise is a share of the figure, and a ratio must not depend on which of the
    two is on top.  B. L. Welch, Biometrika 34 (1947) 28; degrees of freedom: F. E. Satterthwaite, Biometrics Bulletin 2
    (1946) 110.
    """
    logs = [[math.log(value) for value in values] for values in (before, now)]
    difference = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    errors = [statistics.variance(values) / len(values) for values in logs]
    total = sum(errors)
    if total == 0:
        return Interval(*[math.exp(difference)] * 3)
    freedom = total**2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, logs, strict=True))
    half = t_quantile((1 + LEVEL) / 2, freedom) * math.sqrt(total)
    return Interval(*(math.exp(difference + shift) for shift in (0.0, -half, half)))


def t_quantile(probability: float, freedom: float) -> float:
    """Return Student's t that is not exceeded with ``probability``, from 0.5 up, for ``freedom`` of at least 1.

    By bisection of the distribution function: with t = sqrt(freedom) tan(angle) its density becomes a power of a cosine
    on a bounded range, which Simpson's rule integrates to 9 digits.
    """
    # The integral of cos^(freedom - 1) from 0 to a quarter turn is B(1/2, freedom / 2) / 2.
    whole = 0.5 * math.exp(math.lgamma(0.5) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        if 0.5 + _cosine_integral(middle, freedom - 1) / (2 * whole) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _cosine_integral(angle: float, power: float, num_parts: int = 200) -> float:
    """The integral of cos^power from 0 to ``angle``, by Simpson's rule."""
    step = angle / num_parts
    values = [math.pow(math.cos(step * place), power) for place in range(num_parts + 1)]
    return step / 3 * (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]))
