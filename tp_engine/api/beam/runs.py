"""Driving searches: all of a batch in common rounds, or one from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TypeVar

from tqdm import tqdm

from tp_engine.api.beam.search import BeamSearch
from tp_engine.engine.messages import ModelInfo
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest

Result = TypeVar("Result")


def run_searches(
    searches: Sequence[BeamSearch],
    generate: Callable[[list[EngineRequest]], list[RequestOutput]],
    model: ModelInfo,
    *,
    max_searches: int,
    use_tqdm: bool,
) -> None:
    """Run all to their end; ``generate`` completes a list of requests, ``max_searches`` take part in a round.

    The first in order take part, as many as the KV cache holds at once: more would only drive each other's blocks out
    of the prefix cache, and every round would compute its prompts again.
    """
    unfinished = list(searches)
    with tqdm(total=len(searches), desc="prompts", unit="", disable=not use_tqdm) as progress:
        while unfinished:
            chosen = _that_fit(unfinished[:max_searches], model)
            outputs = iter(generate([request for search in chosen for request in search.next_requests()]))
            for search in chosen:
                search.advance(list(islice(outputs, search.num_live)))
            progress.update(sum(search.done for search in chosen))
            unfinished = [search for search in unfinished if not search.done]


async def run_search(search: BeamSearch, generate: Callable[[EngineRequest], Awaitable[RequestOutput]]) -> None:
    """Run one search to its end; the requests of a round run together, and all of them end with this task."""
    while not search.done:
        search.advance(await gather_or_cancel([generate(request) for request in search.next_requests()]))


async def gather_or_cancel(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """All results in order.  When one fails, or the caller is cancelled, the others are ended before this returns."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _that_fit(searches: Sequence[BeamSearch], model: ModelInfo) -> Sequence[BeamSearch]:
    """The first ones that the pool holds together, at least one."""
    num_blocks = 0
    for number, search in enumerate(searches):
        num_blocks += search.num_blocks(model.block_size)
        if number > 0 and num_blocks > model.num_blocks:
            return searches[:number]
    return searches
