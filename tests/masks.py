"""Masks without threads: found at once, by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tp_engine.plan import IntArray


class AtOnce:
    """``GrammarMasks``, found in the caller's thread."""

    def ask(self, matchers: Iterable[Any]) -> None:
        for matcher in matchers:
            if not matcher.is_ready:
                matcher.find_mask()

    def be_patient(self) -> None:
        pass

    def wait(self, matchers: Sequence[Any]) -> None:
        self.ask(matchers)


def fill(matchers: Sequence[Any]) -> IntArray:
    """The masks (n, words) of these ``GrammarMatcher``s."""
    AtOnce().ask(matchers)
    return np.stack([matcher.settle_mask() for matcher in matchers])


class FoundMasks:
    """The scheduler's ``Masks``, which ``find`` gives for any constraints (n, words)."""

    def __init__(self, find: Callable[[Sequence[Any]], IntArray]) -> None:
        self.of = find

    def ask(self, constraints: Iterable[Any]) -> None:
        pass

    def be_patient(self) -> None:
        pass

    def is_ready(self, constraint: Any) -> bool:
        return True
