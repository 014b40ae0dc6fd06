"""An idle engine uses no CPU time, on any rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tp_engine import AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_RANKS = 2
IDLE_S = 4.0
MOST_CPU = 0.05  # of one core; the promise is 0.01 over a minute; the rest allows for other users of the machine
OPTIONS = {"tensor_parallel_size": NUM_RANKS, "device": "cpu", "num_gpu_blocks_override": 32, "max_model_len": 64}


def cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    taken = [process.cpu_times() for process in processes]
    return [times.user + times.system for times in taken]


@pytest.mark.usefixtures("warm_children")
def test_idle_ranks_use_no_cpu(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the kernel's CPU time of every rank's process over some idle seconds, after a request."""
    folder = checkpoint("qwen3")

    async def run() -> list[float]:
        before = set(psutil.Process().children(recursive=True))
        async with AsyncLLM(str(folder), **OPTIONS) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            async for _ in llm.generate([5, 9, 13, 7], params):
                pass
            ranks = [one for one in psutil.Process().children(recursive=True) if one not in before]
            assert len(ranks) >= NUM_RANKS
            await asyncio.sleep(0.5)
            began = cpu_seconds(ranks)
            await asyncio.sleep(IDLE_S)
            return [end - start for start, end in zip(began, cpu_seconds(ranks), strict=True)]

    used_s = asyncio.run(asyncio.wait_for(run(), timeout=120))
    assert max(used_s) < MOST_CPU * IDLE_S, used_s
