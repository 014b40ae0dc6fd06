"""A process that a program forks: its end, and its use of the parent's engine, leave the parent's ranks alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launch import ROOT

pytestmark = pytest.mark.slow

_SCRIPT = """
import gc, multiprocessing, os, sys
from tp_engine import LLM, SamplingParams
from tp_engine.errors import EngineDeadError

llm = LLM({model!r}, tensor_parallel_size=2, device="cpu", num_gpu_blocks_override=32, max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

def ask():
    return llm.generate([5, 9, 13, 7], params, use_tqdm=False)[0].outputs[0].token_ids

def ends():
    sys.exit(0)

def unwinds():
    with llm:
        sys.exit(0)

def uses():
    for use in (ask, llm.sleep):
        try:
            use()
        except EngineDeadError as error:
            assert f"belongs to process {{os.getppid()}}" in str(error), error
        else:
            sys.exit(1)
    llm.close()
    sys.exit(0)

def drops():
    global llm
    del llm
    gc.collect()
    sys.exit(0)

expected = ask()
for act in (ends, unwinds, uses, drops):
    pid = os.fork()
    if pid == 0:
        act()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, act
    assert ask() == expected, act
fork = multiprocessing.get_context("fork")
with fork.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
child = fork.Process(target=sys.exit, args=(3,))
child.start()
child.join()
assert child.exitcode == 3 and ask() == expected
print("done", flush=True)
"""


def test_forked_children_leave_the_engine_to_their_parent(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the parent's answers before and after, and the children's exit codes: by exit, by the end of a ``with``,
    after a use that is refused, by dropping the engine, and from ``multiprocessing``."""
    script = _SCRIPT.format(model=str(checkpoint("qwen3")))
    job = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=340, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert job.returncode == 0 and job.stdout == "done\n", job.stderr[-3000:]
