"""Rank 0's sign of life for a process that is not a rank: the HTTP frontend, or a program with an ``AsyncLLM``.

::

    word 0    last beat, CLOCK_MONOTONIC ns (0: none yet)
    word 1    1 while rank 0 believes that the job hangs
    word 2    bytes of the text that follows: what rank 0 is doing, while it starts

One process writes, one reads; each word is one aligned 8-byte store, and nothing depends on their order.
"""

from __future__ import annotations

import mmap
import time

from tp_engine.ipc.segment import Segment, create_segment, open_segment

_NUM_BYTES = 4096
_TEXT_BYTES = 400
_TEXT_START = 24
_SILENT_S = 5.0


class Pulse(Segment):
    """Created by ``create`` in one process and mapped by ``open`` in the other; either end may beat."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        super().__init__(memory, descriptor)
        self._words = memoryview(memory).cast("q")
        self._text = memoryview(memory)[_TEXT_START : _TEXT_START + _TEXT_BYTES]

    @classmethod
    def create(cls) -> Pulse:
        """Return a new pulse; ``RuntimeError`` if /dev/shm is too small."""
        memory, descriptor = create_segment(_NUM_BYTES)
        return cls(memory, descriptor)

    @classmethod
    def open(cls, address: str) -> Pulse:
        """Return the pulse at ``address``; ``FileNotFoundError`` if its creator has ended."""
        return cls(open_segment(address))

    def beat(self, *, hangs: bool) -> None:
        """Show that rank 0 lives, and whether it believes that the job hangs."""
        self._words[1] = hangs
        self._words[0] = time.monotonic_ns()

    def say(self, text: str) -> None:
        """Show what rank 0 is doing; nothing that a stranger must not read."""
        content = text.encode(errors="replace")[:_TEXT_BYTES]
        self._words[2] = 0
        self._text[: len(content)] = content
        self._words[2] = len(content)

    def doing(self) -> str:
        """Return what rank 0 said last; empty if it has said nothing."""
        return bytes(self._text[: self._words[2]]).decode(errors="replace")

    def silence_s(self) -> float:
        """Seconds since the last beat; 0 before the first, while the engine has not begun to start."""
        beat_ns = self._words[0]
        return (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else 0.0

    def trouble(self) -> str | None:
        """Return why the engine does not work now, or None."""
        silence_s = self.silence_s()
        if silence_s > _SILENT_S:
            return f"rank 0 has shown no sign of life for {silence_s:.0f} s"
        return "the engine hangs" if self._words[1] else None
