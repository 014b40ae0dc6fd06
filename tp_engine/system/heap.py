"""The heap of this process: memory that was freed goes back to the system.

glibc keeps what is freed below something in use, and that of other threads, for later: after a burst of large requests
this can be gigabytes, which nobody needs again.
"""

import ctypes
import threading
import time

from tp_engine.system.units import MIB

_LIBC = ctypes.CDLL(None)
_TRIM_BYTES = 32 * MIB
_DELAY_S = 0.5


def trim_heap() -> None:
    """Give back what is free; takes milliseconds per gigabyte, without the GIL."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


class HeapTrimmer:
    """Trims the heap in a thread of its own a moment after much was freed: what is used again at once is not touched.

    Safe in several threads.
    """

    def __init__(self) -> None:
        self._freed = 0
        self._lock = threading.Lock()
        self._is_waiting = False

    def note_freed(self, num_bytes: int) -> None:
        """Count about ``num_bytes`` that were freed, or will be at once."""
        with self._lock:
            self._freed += num_bytes
            if self._freed < _TRIM_BYTES or self._is_waiting:
                return
            self._is_waiting = True
        threading.Thread(target=self._trim, name="trim-heap", daemon=True).start()

    def _trim(self) -> None:
        time.sleep(_DELAY_S)
        with self._lock:
            self._freed, self._is_waiting = 0, False
        trim_heap()
