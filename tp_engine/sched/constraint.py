"""What the scheduler knows of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tp_engine.plan import IntArray


class TokenConstraint(Protocol):
    """One sequence's place in its grammar.

    ``is_over``: nothing may follow.  ``error``: why it can not be followed any further, though the output is not
    complete.
    """

    is_over: bool
    error: str | None

    def accept(self, token_id: int) -> bool:
        """One more token; False if it is refused, and then the output is over without it."""


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self, *, ignore_eos: bool) -> TokenConstraint:
        """A place before the first token."""


FillMasks: TypeAlias = Callable[[Sequence[Any]], IntArray]
"""From the constraints of n sequences to the masks (n, words) of their next tokens, as ``StepPlan.masks`` has them."""
