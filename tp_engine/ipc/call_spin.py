"""How long a reader that was called spins for the message that is about to come."""

from __future__ import annotations

import time

_SPIN_S = 300e-6
_IDLE_S = 5e-3  # a message that comes later is another's: the call was for one that was not needed
_FEWEST_SKIPPED, _MOST_SKIPPED = 16, 4096


class CallSpin:
    """Spins while that pays.  After a spin in vain the next 16 calls get none; after each further one twice as many.

    In vain it is where making a plan takes long, and where the machine is not what it seems: a hypervisor that runs
    two virtual cores on one gives the spinning reader the time that the writer needs for the message.
    """

    def __init__(self) -> None:
        self._num_left = 0
        self._num_skipped = _FEWEST_SKIPPED
        self._until_s = 0.0

    def begin(self) -> float:
        """After a call: seconds to spin."""
        if self._num_left:
            self._num_left -= 1
            return 0.0
        self._until_s = time.monotonic() + _SPIN_S
        return _SPIN_S

    def end(self) -> None:
        """The message is there, be it by spinning or not."""
        if self._until_s == 0.0:
            return
        late_s = time.monotonic() - self._until_s
        self._until_s = 0.0
        if late_s <= 0.0:
            self._num_skipped = _FEWEST_SKIPPED
        elif late_s < _IDLE_S:
            self._num_left = self._num_skipped
            self._num_skipped = min(2 * self._num_skipped, _MOST_SKIPPED)
