"""A rank that is late: in kernels in which ranks meet, over memory that they share.

After its first meeting in a launch an odd rank waits until another one comes to the next: only then must the others
keep their memory as it is.  Where that meeting is missing, they have gone on to what they do next with the same memory,
and the late rank reads that.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_LIMIT_S = 20.0  # of a rank that is not waited for
_NAP_S = 0.001
_NEVER = 2  # the word of gather_triton that no signal is
# The words in which a sum of ranks counts, by rank, and this rank.
counts: tuple[Sequence[ctypes.c_int64], int] = ((), 0)


class Launch:
    """One launch; ``arguments`` are its kernel's, by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._is_late = "signals" in arguments and bool(arguments["rank"] % 2)
        if self._is_late:
            self._signals, self._num_words = int(arguments["signals"][arguments["rank"]]), 2 * arguments["WORLD_SIZE"]

    def exchanged(self, places: np.ndarray, wanted: np.ndarray, found: np.ndarray, is_acquire: bool) -> None:
        """Note an exchange of the words at ``places``, of which those that were as ``wanted`` have been changed."""
        if not self._is_late or not is_acquire or not bool(((found == wanted) | (wanted == _NEVER)).all()):
            return
        self._is_late = False
        num_bytes = (
            4 * self._num_words
        )  # of the two meetings of a program, which is the last one in every second launch
        first = (int(places.min()) - self._signals) // num_bytes * num_bytes
        words = (ctypes.c_int32 * self._num_words).from_address(self._signals + first)
        pad, end_s = np.ctypeslib.as_array(words), time.monotonic() + _LIMIT_S
        while not pad.any() and not _others_sum() and time.monotonic() < end_s:
            time.sleep(_NAP_S)


def _others_sum() -> bool:
    """Whether another rank has come to a sum that this one has not."""
    words, rank = counts
    return any(one.value > words[rank].value for one in words)
