"""How many requests the server holds at once: a full house is a 429, a closing one a 503."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from tp_engine.api.openai.errors import HttpError

RETRY_AFTER_S = 1


class Admission:
    """Counts prompts from acceptance to the last byte of their answer.  Used by the event loop's thread alone.

    ``max_num_prompts`` is set when the engine is known.
    """

    def __init__(self) -> None:
        self.max_num_prompts = 0
        self._num_prompts = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_prompts(self) -> int:
        """Prompts inside now."""
        return self._num_prompts

    def check_open(self) -> None:
        """``HttpError`` 503 once new requests are refused for good."""
        if self._draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)

    def start_draining(self) -> None:
        """Refuse new requests from now on; those inside may finish."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False if somebody still is after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def check_room(self, num_prompts: int = 1) -> None:
        """``HttpError`` unless ``num_prompts`` could be inside now."""
        self.check_open()
        if self._num_prompts + num_prompts > self.max_num_prompts:
            raise HttpError(
                429,
                f"{self._num_prompts} prompts are running or queued and {num_prompts} more do not fit in "
                f"{self.max_num_prompts}; try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextlib.contextmanager
    def hold(self, num_prompts: int) -> Iterator[None]:
        """Be inside with ``num_prompts``; raises ``HttpError``."""
        self.check_room(num_prompts)
        self._num_prompts += num_prompts
        self._idle.clear()
        try:
            yield
        finally:
            self._num_prompts -= num_prompts
            if self._num_prompts == 0:
                self._idle.set()
