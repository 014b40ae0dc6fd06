"""A store whose waits end when the job has failed, also the waits inside torch.distributed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tp_engine.distributed import groups
from tp_engine.distributed.store import WatchedStore
from tp_engine.errors import RankError
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo

ROOT = Path(__file__).parents[3]

# Rank 0 of two whose other rank never comes: it must hear of the failure inside init_process_group.
LONELY = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from tp_engine.distributed.store import WatchedStore
from tp_engine.errors import RankError
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
began_s = time.monotonic()
def check():
    if time.monotonic() - began_s > 0.3:
        raise RankError(1, "its process is gone")
watched = WatchedStore(store, check, timeout_s=60)
try:
    dist.init_process_group("gloo", store=watched, rank=0, world_size=2, timeout=timedelta(seconds=60))
except RankError as error:
    print(error, time.monotonic() - began_s < 20)
"""


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20), use_libuv=True
    )


def test_values_pass_through(store: dist.TCPStore) -> None:
    """Oracle: the underlying store."""
    watched = WatchedStore(store, lambda: None, timeout_s=5)
    watched.set("a", "1")
    assert store.get("a") == watched.get("a") == b"1"
    assert watched.add("n", 2) == 2 and watched.add("n", 3) == 5
    assert watched.check(["a"]) and not watched.check(["a", "b"])
    assert watched.multi_get(["a", "a"]) == [b"1", b"1"]
    assert watched.delete_key("a") and not watched.check(["a"])


def test_a_wait_ends_with_the_value(store: dist.TCPStore) -> None:
    """Oracle: the key is set during the wait."""
    watched = WatchedStore(store, lambda: None, timeout_s=20)
    setting = threading.Timer(0.05, store.set, ("late", "x"))
    setting.start()
    assert watched.get("late") == b"x"
    setting.join()


def test_a_wait_ends_with_what_the_check_raises(store: dist.TCPStore) -> None:
    """Oracle: the error, long before the deadline; without a failure, the deadline."""

    def check() -> None:
        raise RankError(1, "its process is gone")

    began_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        WatchedStore(store, check, timeout_s=60).get("never")
    assert time.monotonic() - began_s < 10
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for never"):
        WatchedStore(store, lambda: None, timeout_s=60).wait(["never"], timedelta(seconds=0.05))


def test_who_does_not_come_to_the_meeting_is_named(store: dist.TCPStore) -> None:
    """Oracle: of three ranks, the error blames the first that has not joined, not the one that waits."""
    store.set("rank 2 joins", "1")
    watched = WatchedStore(store, lambda: None, timeout_s=0.05)
    with pytest.raises(RankError, match=r"rank 1: has not joined the job in time \(missing: 1;") as caught:
        groups._meet(watched, RankInfo(world_size=3, local_world_size=3), RankProgress())
    assert caught.value.rank == 1


def test_a_process_group_that_meets_through_it_hears_of_a_death() -> None:
    """Oracle: init_process_group, which waits for the other rank in C++, raises the error."""
    done = subprocess.run([sys.executable, "-c", LONELY], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout == "rank 1: its process is gone True\n", done.stderr[-2000:]


def test_the_groups_can_use_their_store_later(store: dist.TCPStore) -> None:
    """Oracle: a second group meets through the store: symmetric memory does that long after the start.  Torch's default
    group is none of them."""
    joined = groups.join(
        RankInfo(), store, RankProgress(), lambda: None, device_type="cpu", start_s=20.0, collective_s=20.0
    )
    try:
        gc.collect()
        later = joined.new_group("later", [0])
        total = torch.ones(2)
        dist.all_reduce(total, group=later)
        assert later is not None and total.tolist() == [1.0, 1.0] and not dist.is_initialized()
    finally:
        joined.close()
