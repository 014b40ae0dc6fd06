"""From the engine's steps to the requests' mailboxes, in order, without holding up the event loop.

::

    a small step, none before it    processed and handed out at once
    any other                       processed (detokenized) in a thread, handed out SLICE updates per turn of the loop
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tp_engine.api.output_processor import Processed
from tp_engine.log import get_logger
from tp_engine.request import StepOutput

logger = get_logger(__name__)

SMALL_STEP = 32  # updates; about a third of a millisecond
SLICE = 32

Last = Callable[[], None]


class OutputPipeline:
    """``process`` runs in the event loop's thread or in another one, never in both at a time.

    ``deliver`` runs in the loop's; it gets every step's result in one or more parts, its aborts with the first.
    """

    def __init__(self, process: Callable[[StepOutput], Processed], deliver: Callable[[Processed], None]) -> None:
        self._process = process
        self._deliver = deliver
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="detokenizing")
        self._waiting: deque[StepOutput | Last] = deque()
        self._task: asyncio.Task[None] | None = None

    def push(self, output: StepOutput) -> None:
        """Take one step's output."""
        if self._task is None and len(output) <= SMALL_STEP:
            self._deliver(self._process(output))
        else:
            self._wait(output)

    def after(self, last: Last) -> None:
        """Call ``last`` when everything pushed before has been handed out."""
        if self._task is None:
            last()
        else:
            self._wait(last)

    async def keep_up(self) -> None:
        """Return when all has been handed out, and not before other tasks have had a turn; raises what went wrong."""
        if self._task is None:
            await asyncio.sleep(0)
        else:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Hand out what is left; nothing may be pushed any more."""
        while self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=False)

    def _wait(self, item: StepOutput | Last) -> None:
        self._waiting.append(item)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, StepOutput):
                    await self._hand_out(item)
                else:
                    item()
        finally:
            self._task = None

    async def _hand_out(self, output: StepOutput) -> None:
        loop = asyncio.get_running_loop()
        processed = await loop.run_in_executor(self._thread, self._process, output)
        for start in range(0, max(1, len(processed.updates)), SLICE):
            part = processed.updates[start : start + SLICE]
            self._deliver(Processed(updates=part, aborts=processed.aborts if start == 0 else []))
            await asyncio.sleep(0)
