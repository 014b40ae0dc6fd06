"""The two tiers of the tests.

A test marked ``slow`` is in the rest, which ``scripts/test --all`` adds to the fast tier of ``scripts/test``.  The rest
has slow and repetitive tests: more seeds, more numbers of ranks, other GPUs, and clients and soaks of minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast_first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``: the first ``count`` are in the fast tier, the others are slow."""
    return [value if place < count else _slow(value) for place, value in enumerate(values)]


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``: those in ``fast`` are in the fast tier, the others are slow."""
    kept = list(fast)
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    """``value``, or the values of several parameters in a tuple, with the marker."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
