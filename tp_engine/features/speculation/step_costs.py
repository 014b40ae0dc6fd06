"""What a draft token costs: the time of a decode step by its number of rows, measured at the start.

A step with draft tokens gives more tokens and takes longer.  Draft tokens pay as long as tokens per second rise::

    rows          1      1 + 1   1 + 2   1 + 3      of one row that decodes, with draft tokens
    seconds       10     11      12      13
    likelihood           0.9     0.5     0.1        that the draft token is kept
    tokens        1      1.9     2.4     2.5        that the step gives
    per second    0.100  0.173   0.200  0.192       so two draft tokens are verified

A draft head's own time is measured too, of one more draft for each row of a step: a step asks the head for as many as
raise tokens per second with it, for none where rows are many.

The times decide how many tokens are drafted and verified, never which tokens come out.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_VERIFYING_S = 150e-6
"""What rank 0 does for a step with draft tokens beside its rows: it finds and judges them, and sends no plan ahead."""

_LEAST_LIKELY = 0.5
"""Of draft tokens as likely as this, one for each row pays up to ``StepCosts.most_decodes`` rows."""


class StepCosts:
    """Seconds of decode steps, those ``measured``, as (rows, seconds), and straight lines between them; and seconds of
    one more draft for each row, ``drafting``, of a head."""

    def __init__(self, measured: Sequence[tuple[int, float]], drafting: Sequence[tuple[int, float]] = ()) -> None:
        rows, seconds = np.array(sorted(measured), dtype=np.float64).T
        every = np.arange(int(rows[-1]) + 1)
        self._seconds: npt.NDArray[np.float64] = np.interp(every, rows, np.maximum.accumulate(seconds))
        rows, seconds = np.array(sorted(drafting) or [(1, 0.0)], dtype=np.float64).T
        self._drafting: npt.NDArray[np.float64] = np.interp(every, rows, np.maximum.accumulate(seconds))

    @property
    def most_decodes(self) -> int:
        """Most rows that get draft tokens, because one for each of them pays; at least 1.  A step of fewer rows may
        have more draft tokens than rows, where they are likely (``num_paying``)."""
        decodes = np.arange(1, len(self._seconds) // 2 + len(self._seconds) % 2)
        pays = (1 + _LEAST_LIKELY) * self._seconds[decodes] >= self._seconds[2 * decodes] + self._drafting[decodes]
        return int(max(decodes[pays], default=1))

    def num_drafts(self, num_decodes: int, likelihoods: npt.NDArray[np.float64]) -> int:
        """Return how many tokens a head should draft after each of ``num_decodes`` rows, which are right with
        ``likelihoods`` (n,) that fall."""
        room = (len(self._seconds) - 1) // num_decodes  # rows of a step for each that decodes
        counts = np.arange(max(1, min(len(likelihoods) + 1, room)))
        tokens = 1.0 + np.concatenate(([0.0], likelihoods.cumsum()))[: len(counts)]
        places = np.minimum(num_decodes * (1 + counts), len(self._seconds) - 1)
        seconds = self._seconds[places] + counts * self._drafting[min(num_decodes, len(self._drafting) - 1)]
        seconds[1:] += _VERIFYING_S
        return int(np.argmax(tokens / seconds))

    def num_paying(self, num_decodes: int, likelihoods: npt.NDArray[np.float64]) -> int:
        """Return how many draft tokens to verify beside ``num_decodes`` rows, the likeliest first: ``likelihoods`` (n,)
        fall.  There are measured times for ``num_decodes`` + n rows."""
        tokens = num_decodes + np.concatenate(([0.0], likelihoods.cumsum()))
        seconds = self._seconds[num_decodes : num_decodes + len(tokens)].copy()
        seconds[1:] += _VERIFYING_S
        return int(np.argmax(tokens / seconds))
