"""Ranks forked from a process that has torch and the engine imported already.

Importing takes a second of CPU time per rank, more than most cases.  Jobs whose start is not what the test is about run
here; ``tests.ranks.launch`` starts real torchrun.  The ranks have the environment of torchrun's ranks, and they meet at
a store of this process, as torchrun's ranks meet at the one of its agent.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeAlias

from tests.services import services, start_in_thread
from tp_engine.distributed.store import host_store

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.ranks.chats_job", "tests.ranks.forced_job", "tests.ranks.sampling_job",
        "tp_engine.engine.rank_worker", "tp_engine.server.main",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",  # what towers for images are made of: 4 s of processor time
    ]
)  # fmt: skip
_STORE_S = 60.0
_KILLED_S = 20.0

Rank: TypeAlias = multiprocessing.context.ForkServerProcess


def warm_ranks(num_ranks: int, target: Callable[..., None], *arguments: object, timeout_s: float = 340.0) -> str:
    """Call ``target(*arguments)`` on each of ``num_ranks`` ranks; returns what they printed.

    ``AssertionError`` with the output if a rank fails or the deadline passes; the other ranks are then killed.
    ``target`` and ``arguments`` are pickled.
    """
    deadline_s = time.monotonic() + timeout_s
    with started_ranks(num_ranks, target, *arguments) as (ranks, log):
        codes = _await(ranks, deadline_s)
        output = log.read_text(encoding="utf-8", errors="replace")
    assert codes == [0] * num_ranks, f"exit codes {codes} (None: no end within {timeout_s:g} s):\n{output[-6000:]}"
    return output


@contextmanager
def started_ranks(num_ranks: int, target: Callable[..., None], *arguments: object) -> Iterator[tuple[list[Rank], Path]]:
    """As ``warm_ranks``, without waiting: the processes, and what they print.  They are killed in the end."""
    store = host_store(timeout_s=_STORE_S)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output.txt"
        log.touch()
        ranks = [
            FORKS.Process(target=_run, args=(_environment(rank, num_ranks, store.port), str(log), target, arguments))
            for rank in range(num_ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            yield ranks, log
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(_KILLED_S)


def _await(ranks: list[Rank], deadline_s: float) -> list[int | None]:
    """The ranks' exit codes when all have ended, one has failed, or ``deadline_s`` (monotonic) has passed."""
    while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        if any(rank.exitcode for rank in ranks) or not wait(running, max(0.0, deadline_s - time.monotonic())):
            break
    return [rank.exitcode for rank in ranks]


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables of torchrun for one host; its agent has the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "warm",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run(environment: dict[str, str], log: str, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """A rank's main function.  What was imported before the fork is never garbage: it is not searched for it."""
    gc.freeze()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    with services(start_in_thread):  # of a single rank
        target(*arguments)
