"""An engine that starts its own ranks from a plain script: it answers, ends cleanly, and leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import on_this_machine
from tests.ranks.launch import ROOT, TWO_RANKS, torchrun
from tests.ranks.warm_children import warm_start
from tp_engine import LLM, AsyncLLM, SamplingParams
from tp_engine.errors import EngineDeadError, RankError

PROMPT = [5, 9, 13, 7]

# No ``if __name__ == "__main__"``: starting ranks must not run the script again.
SCRIPT = """
from tp_engine import LLM, SamplingParams
print("script runs")
llm = LLM({model!r}, tensor_parallel_size=2, device="cpu", num_gpu_blocks_override=32, max_model_len=64)
output = llm.generate([5, 9, 13, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
print("tokens", *output.outputs[0].token_ids, flush=True)
{then}
"""


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The oracle: one rank."""
    with LLM(str(folder), **{**TWO_RANKS, "tensor_parallel_size": 1}) as llm:
        return answer(llm)


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def started_script(folder: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(model=str(folder), then=then)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def check_script(script: subprocess.Popen[str], expected: list[int], code: int) -> None:
    """The script ran once, with the tokens ``expected``, and ended with ``code``."""
    printed, errors = script.communicate(timeout=170)
    assert printed.splitlines() == ["script runs", "tokens " + " ".join(map(str, expected))], errors[-3000:]
    assert script.returncode == code, errors[-3000:]
    assert "resource_tracker" not in errors and "Traceback" not in errors


def test_a_plain_script_starts_and_stops_its_ranks(folder: Path, expected: list[int]) -> None:
    """Oracle: one rank.  The engine is closed.  The script runs once, keeps its own exit code, and leaves no rank."""
    with started_script(folder, "llm.close()") as script:
        check_script(script, expected, code=0)


SECOND = """
import asyncio
from tp_engine import AsyncLLM, run_batch
from tp_engine.errors import ConfigError
llm.close()
seconds = (
    lambda: LLM({model!r}),
    lambda: run_batch(__file__, __file__ + ".out"),
    lambda: asyncio.run(AsyncLLM({model!r}).start()),
)
for second in seconds:
    try:
        second()
    except ConfigError as error:
        print("refused", "start the script without torchrun" in str(error))
"""


@pytest.mark.slow
def test_the_same_script_under_torchrun_adopts_its_ranks(folder: Path, expected: list[int], tmp_path: Path) -> None:
    """Oracle: one rank.  Rank 0 runs on; rank 1 serves inside the constructor and exits with code 0.  A second engine
    is refused with its remedy, at once, because the other rank ended with the first one."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(model=str(folder), then=SECOND.format(model=str(folder))))
    job = torchrun(2, [str(script)])
    assert job.returncode == 0, job.stdout[-4000:]
    assert job.stdout.count("tokens " + " ".join(map(str, expected))) == 1
    assert job.stdout.count("script runs") == 2 and job.stdout.count("refused True") == 3


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    """Oracle: rank 0's error names rank 1, whose script ended before, long before the limit of the start (600 s)."""
    script = tmp_path / "job.py"
    leaves = "import os\nif os.environ['RANK'] == '1': raise SystemExit(0)\n"
    script.write_text(leaves + SCRIPT.format(model=str(folder), then=""))
    job = torchrun(2, [str(script)])
    assert job.returncode != 0
    assert "RankError: rank 1: its process ended before it came to this engine" in job.stdout, job.stdout[-4000:]


def refuse_ring(*_: object, **__: object) -> None:
    raise RuntimeError("/dev/shm is too small")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ring", "0:load:raise"])
def test_a_fault_of_rank_0_blames_no_other_rank(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the caller gets rank 0's own error, although rank 0 then kills rank 1."""
    if fault == "ring":
        monkeypatch.setattr("tp_engine.engine.build.PlanPublisher", refuse_ring)
    else:
        monkeypatch.setenv("TP_ENGINE_FAULT", fault)
    with warm_start(), pytest.raises(RuntimeError, match=r"/dev/shm is too small|injected by") as caught:
        LLM(str(folder), **TWO_RANKS)
    assert not isinstance(caught.value, RankError)


@pytest.mark.slow
def test_ranks_die_with_a_script_that_is_killed(folder: Path) -> None:
    """Oracle: after kill -9 of the script its ranks are gone within 10 s (promise 3)."""
    with started_script(folder, "import time; time.sleep(60)") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "script runs\n" and script.stdout.readline().startswith("tokens")
        children = psutil.Process(script.pid).children(recursive=True)
        assert len(children) == 2
        script.kill()
        _, alive = psutil.wait_procs(children, timeout=on_this_machine(10))
        assert not alive


def test_a_killed_rank_is_named_and_the_engine_stops(folder: Path) -> None:
    """Oracle: after kill -9 of the idle rank 1 the next call's error names it, and closing leaves nothing behind."""
    with LLM(str(folder), **TWO_RANKS) as llm:
        answer(llm)
        (rank,) = (child for child in psutil.Process().children() if "rank_process" in " ".join(child.cmdline()))
        rank.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1: process \d+ ended with signal 9"):
            answer(llm)
        assert time.monotonic() - started < on_this_machine(10)
        with pytest.raises(EngineDeadError):
            answer(llm)


@pytest.mark.slow
def test_engines_that_start_at_once_never_meet(folder: Path, expected: list[int]) -> None:
    """Oracle: one rank's answer, from each of two scripts with two ranks that start at once (promise 7).  One script
    closes its engine, the other forgets it and keeps its own exit code; both leave no rank."""
    with started_script(folder, "llm.close()") as closing, started_script(folder, "raise SystemExit(3)") as forgetting:
        check_script(closing, expected, code=0)
        check_script(forgetting, expected, code=3)


@pytest.mark.slow
def test_async_llm_streams_what_llm_generates(folder: Path, expected: list[int]) -> None:
    """Oracle: LLM.  Two streams at once; the test leaves one early: its request is aborted and its blocks come back."""
    import asyncio

    async def run() -> None:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        async with AsyncLLM(str(folder), **TWO_RANKS) as llm:

            async def leave_early() -> None:
                async for _ in llm.stream(PROMPT, long):
                    return

            tokens: list[int] = []
            leaving = asyncio.create_task(leave_early())
            async for update in llm.stream(PROMPT, params):
                tokens += update.token_ids
            await leaving
            assert tokens == expected
            async for output in llm.generate(PROMPT, params):
                last = output
            assert last.outputs[0].token_ids == expected
            stats = (await llm.engine.report()).stats
            assert stats.num_running == stats.num_used_blocks == 0

    with warm_start():
        asyncio.run(asyncio.wait_for(run(), timeout=120))


@pytest.mark.slow
def test_a_stopped_rank_0_of_an_async_llm_is_ended(folder: Path) -> None:
    """Oracle: after SIGSTOP of the engine's process the stream fails at the hard limit, and no process stays."""
    import asyncio

    limits: dict[str, Any] = {"watchdog_warn_s": 1.0, "watchdog_timeout_s": 2.0}

    async def run() -> None:
        async with AsyncLLM(str(folder), **TWO_RANKS, **limits) as llm:
            stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
            await anext(stream)
            (rank0,) = (child for child in psutil.Process().children() if "service_process" in child.cmdline()[-1])
            rank0.suspend()
            with pytest.raises(EngineDeadError, match=r"no sign of life|went away"):
                async for _ in stream:
                    pass
            _, alive = psutil.wait_procs([rank0], timeout=on_this_machine(10))
            assert not alive

    asyncio.run(asyncio.wait_for(run(), timeout=120))
