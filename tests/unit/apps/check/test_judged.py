"""What is within the bounds of an engine in 16 bits: another draw of the same errors, and nothing further off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tp_engine.apps.check.answers import Floats
from tp_engine.apps.check.judged import EXACT_LOGPROBS, Errors

NUM_POSITIONS = 96


def drawn(seed: int) -> Floats:
    """Errors as roundings make them: most alike, those of a few sensitive positions far larger."""
    rng = np.random.default_rng(seed)
    size = np.where(np.arange(NUM_POSITIONS) % 32 == 0, 0.02, 0.004)
    return np.asarray(np.abs(rng.normal(size=NUM_POSITIONS)) * size, np.float32)


def excess(own: Floats, twin: Floats | None) -> float:
    exact = np.zeros((NUM_POSITIONS, 1), np.float32)
    known = None if twin is None else twin[:, None]
    return Errors.between(own[:, None], exact, known, floor=EXACT_LOGPROBS).excess


def test_another_draw_of_the_same_errors_is_right() -> None:
    """Oracle: the same distribution; 200 pairs of draws, most of whose largest errors differ by more than half."""
    pairs = [(drawn(2 * seed), drawn(2 * seed + 1)) for seed in range(200)]
    assert max(excess(own, twin) for own, twin in pairs if own.max() < 2.25 * twin.max()) < 1
    assert sum(own.max() > 1.5 * twin.max() for own, twin in pairs) > 20, "the largest alone would be no measure"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda own: own * 2, id="all-twice-as-far"),
        pytest.param(lambda own: np.where(np.arange(NUM_POSITIONS) < 20, 0.05, own), id="a-fifth-of-the-positions"),
        pytest.param(lambda own: np.where(np.arange(NUM_POSITIONS) == 70, 0.5, own), id="one-position"),
        pytest.param(lambda own: np.where(np.arange(NUM_POSITIONS) == 70, np.nan, own), id="no-number"),
    ],
)
def test_what_is_further_off_is_wrong(spoil: Callable[[Floats], Floats]) -> None:
    """Oracle: the changed errors."""
    assert all(excess(spoil(drawn(2 * seed)), drawn(2 * seed + 1)) > 1 for seed in range(20))


def test_an_engine_in_float32_has_a_fixed_bound() -> None:
    """Oracle: 1e-4, for each log-probability."""
    right = np.full(NUM_POSITIONS, 0.9e-4, np.float32)
    assert excess(right, None) < 1 < excess(np.where(np.arange(NUM_POSITIONS) == 3, 1.1e-4, right), None)
