"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_MAX_WAITING = 64


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """(number of the stream, its next item) as they come; closing this closes all of them.

    The first failure ends it.  A consumer that is slow holds the streams up once a few items wait for it.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | None] = asyncio.Queue(_MAX_WAITING)
    tasks = [asyncio.create_task(_feed(queue, number, stream)) for number, stream in enumerate(streams)]
    watcher = asyncio.create_task(_end_when_done(queue, tasks))
    try:
        while (pair := await queue.get()) is not None:
            yield pair
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, watcher):
            task.cancel()
        await asyncio.gather(*tasks, watcher, return_exceptions=True)


async def _feed(queue: asyncio.Queue[tuple[int, Item] | None], number: int, stream: AsyncGenerator[Item, None]) -> None:
    async with contextlib.aclosing(stream) as items:
        async for item in items:
            await queue.put((number, item))


async def _end_when_done(queue: asyncio.Queue[tuple[int, Item] | None], tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    await queue.put(None)
