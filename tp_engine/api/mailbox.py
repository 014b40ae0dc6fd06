"""One request's updates between the engine and its reader: taken all at once, and bounded however slow the reader is.

::

    put      [u u u u ...]      as they come, so that each keeps its own chunk
    from MAX_WAITING on         an update is folded into the last one of its sequence, up to MAX_FOLDED_TOKENS tokens
"""

from __future__ import annotations

import asyncio

from tp_engine.api.request_state import SequenceUpdate

MAX_WAITING = 64
MAX_FOLDED_TOKENS = 256


class Mailbox:
    """Updates that nobody has read yet, and the error behind them.  Used by the event loop's thread alone."""

    def __init__(self) -> None:
        self._updates: list[SequenceUpdate] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._updates)

    def put(self, update: SequenceUpdate) -> None:
        """Add an update."""
        if len(self._updates) < MAX_WAITING or not self._fold(update):
            self._updates.append(update)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing follows but ``error``."""
        self._error = error
        self._wake()

    async def take(self) -> list[SequenceUpdate]:
        """All updates that wait, at least one; raises the error once they have been taken."""
        while not self._updates:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._updates = self._updates, []
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fold(self, update: SequenceUpdate) -> bool:
        """Whether ``update`` has become a part of its sequence's last one."""
        for last in reversed(self._updates):
            if last.index == update.index:
                if len(last.token_ids) + len(update.token_ids) > MAX_FOLDED_TOKENS:
                    return False
                _append(last, update)
                return True
        return False


def _append(last: SequenceUpdate, update: SequenceUpdate) -> None:
    last.text += update.text
    last.token_ids += update.token_ids
    last.num_output_tokens = update.num_output_tokens
    last.num_cached_tokens = update.num_cached_tokens
    if update.logprobs is not None:
        last.logprobs = (last.logprobs or []) + update.logprobs
    last.finish_reason, last.stop_reason, last.error = update.finish_reason, update.stop_reason, update.error
    last.request_output = update.request_output
