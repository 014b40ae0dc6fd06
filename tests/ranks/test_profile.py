"""Traces of an engine with several ranks: of steps chosen in advance, and of the steps between start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.worker.test_profiling import names_in
from tp_engine import AsyncLLM, RequestError, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

PROMPT = [5, 9, 13, 7]


async def tokens_of(llm: AsyncLLM, max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    *_, last = [output async for output in llm.generate(PROMPT, params)]
    return last.outputs[0].token_ids


def parts_in(path: Path) -> list[str]:
    return [name for name in names_in(path) if name in ("prepare", "model", "sample") or name.startswith("step ")]


def test_every_rank_writes_traces_of_the_same_steps(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the names of the chosen steps and their parts, on both ranks; the tokens equal those without a trace."""
    folder = tmp_path / "traces"

    async def scenario() -> None:
        async with AsyncLLM(
            str(checkpoint("qwen3")), tensor_parallel_size=2, device="cpu", num_gpu_blocks_override=16,
            max_model_len=64, profile=str(folder), profile_steps="2:4",
                enforce_eager=True,  # a step from a tape has no parts
        ) as llm:  # fmt: skip
            plain = await tokens_of(llm, 40)
            chosen = sorted(folder.iterdir())
            assert [path.name for path in chosen] == ["rank0_steps2-3.json.gz", "rank1_steps2-3.json.gz"]
            parts = ["prepare", "model", "sample"]
            assert [parts_in(path) for path in chosen] == [["step 2", *parts, "step 3", *parts]] * 2
            running = asyncio.create_task(tokens_of(llm, 40))
            assert await llm.engine.act("start_profile") == {"folder": str(folder)}
            with pytest.raises(RequestError, match="requests are running"):
                while not running.done():
                    await llm.engine.act("reset_prefix_cache")
            assert await running == plain
            await llm.engine.act("stop_profile")
            ordered = [parts_in(path) for path in sorted(folder.iterdir()) if path not in chosen]
            assert len(ordered) == 2 and ordered[0] == ordered[1] and len(ordered[0]) >= 4 * 5
            assert await llm.engine.act("reset_prefix_cache") == {}
            assert (await llm.engine.act("describe"))["tensor_parallel_size"] == 2
            assert await tokens_of(llm, 40) == plain

    asyncio.run(asyncio.wait_for(scenario(), 100))
