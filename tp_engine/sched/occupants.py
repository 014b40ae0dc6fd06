"""Who sits at some rows, kept as long as the same rows decode."""

from __future__ import annotations

from functools import cached_property

from tp_engine.sched.sequence import Sequence


class Occupants:
    """The ``sequences`` at some rows, in the rows' order."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences

    @cached_property
    def names(self) -> tuple[list[str], list[int]]:
        """Request id of each, and its index among the request's sequences.  Not to be changed."""
        return [one.group.request.request_id for one in self.sequences], [one.index for one in self.sequences]
