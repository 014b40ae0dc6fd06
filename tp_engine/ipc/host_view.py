"""What a rank's host knows about the rank's process: words of its slot that other hosts need, as they can not look.

::

    word 0   ended at, ns; 0 while it is not known to have ended     1   how: ``Ended``
         2   the kernel's letter for its state (0: not known)        3   CPU time it has used, in clock ticks
         4   resident bytes                                          5.. the host's name, 64 bytes

The first rank of the host writes words 0 to 4 on its own board; the connection between the hosts carries them to the
others, where ``Ended`` may also say that the connection itself has ended.  With one host only the name is written.
"""

import socket
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

_NAME: Final = 5
_NAME_WORDS: Final = 8
HOST_WORDS: Final = _NAME + _NAME_WORDS


class Ended(IntEnum):
    """How the end of a rank's process became known."""

    NOT = 0
    PROCESS = 1
    CLOSED = 2
    LOST = 3


class HostView:
    """The words above, of one rank; ``words`` is (13,) int64, shared."""

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        self._name = words[_NAME:].view(np.uint8)

    def note_name(self) -> None:
        """Called by the rank: the name of its host."""
        raw = np.frombuffer(socket.gethostname().encode(errors="replace")[: len(self._name)], np.uint8)
        self._name[: len(raw)] = raw

    def note_ended(self, how: Ended, now_ns: int) -> None:
        """Note that the process has ended, or can not be reached any more; later calls do nothing."""
        if not self._words[0]:
            self._words[1] = how
            self._words[0] = now_ns

    def note_vitals(self, state: str, ticks: int, resident_bytes: int) -> None:
        """Note what the kernel says about the process."""
        self._words[2], self._words[3], self._words[4] = ord(state), ticks, resident_bytes

    @property
    def ended(self) -> Ended:
        """How the process ended, as far as known."""
        return Ended(int(self._words[1])) if self._words[0] else Ended.NOT

    @property
    def vitals(self) -> tuple[str, int]:
        """As ``process_vitals``; ``("X", 0)`` while nothing is known."""
        return (chr(self._words[2]) if self._words[2] else "X"), int(self._words[3])

    @property
    def resident_bytes(self) -> int:
        """The process's resident memory; 0 if it is not known."""
        return int(self._words[4])

    @property
    def name(self) -> str:
        """The host's name; empty before the rank has registered."""
        return self._name.tobytes().rstrip(b"\0").decode(errors="replace")
