"""What is found in the logs of jobs on fake GPUs, made up here; the oracle is what each log shows by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.logs import faults, ledger_faults, main, read_logs

FLOAT32, BFLOAT16 = 7, 9


def event(kind: str, device: int = 0, is_main: bool = True, **more: Any) -> dict[str, Any]:
    """One event of thread 1."""
    return {"thread": 1, "main": is_main, "device": device, "event": kind, **more}


def nccl(op: str, count: int = 128, *, type: int = FLOAT32, peer: int = -1, graph: int = -1) -> dict[str, Any]:
    """A call of NCCL."""
    return event("nccl", op=op, comm=77, count=count, type=type, peer=peer, graph=graph)


def rank_log(rank: int, *calls: dict[str, Any], size: int = 2, **kept: int) -> list[dict[str, Any]]:
    """A process of a rank that makes ``calls`` and ends, with what it kept."""
    none = {"device_bytes": 0, "pinned_bytes": 0, "registered_bytes": 0, "mapped_bytes": 0}
    start = [
        event("context", device=rank, by="cudaSetDevice", name="python"),
        {**nccl("CommInit"), "rank": rank, "size": size},
    ]
    return [*start, *calls, {**event("end"), **none, **kept}]


def found(folder: Path, *processes: Sequence[dict[str, Any]], **options: Any) -> list[str]:
    """The faults of a job with these processes."""
    for number, events in enumerate(processes):
        (folder / f"{100 + number}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return faults(read_logs(folder), **options)


def test_a_right_job(tmp_path: Path) -> None:
    """Two ranks with equal collectives, a message between them, and a recording that runs."""
    same = [
        nccl("AllReduce"),
        event("capture", graph=0),
        nccl("AllGather", graph=0),
        event("captured", graph=0, nodes=1),
    ]
    first = [*same, event("replay", graph=0), nccl("Recv", 9, peer=1), nccl("CommDestroy")]
    second = [*same, event("replay", graph=0), nccl("Send", 9, peer=0), nccl("CommAbort")]
    ranks = rank_log(0, *first), rank_log(1, *second)
    frontend = [event("end", device_bytes=0, pinned_bytes=0, registered_bytes=0, mapped_bytes=0)]
    assert found(tmp_path, *ranks, frontend) == []
    assert main(str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([nccl("AllReduce", 64)], "AllReduce of 64 x float32 (communicator 0000004d)"),
        ([nccl("AllReduce", type=BFLOAT16)], "AllReduce of 128 x bfloat16 (communicator 0000004d)"),
        ([nccl("AllReduce", graph=3)], "AllReduce of 128 x float32 in graph 3 (communicator 0000004d)"),
        ([event("replay", graph=2)], "replay of graph 2"),
        ([], "has ended"),
    ],
)
def test_the_first_different_call(theirs: list[dict[str, Any]], expected: str, tmp_path: Path) -> None:
    """Another size, type, place or call, and a rank that stops early; later ones are not told."""
    own = [nccl("AllReduce"), nccl("AllReduce"), nccl("AllGather")]
    faults_found = found(tmp_path, rank_log(0, *own), rank_log(1, nccl("AllReduce"), *theirs))
    first = "call 2: rank 0 has AllReduce of 128 x float32 (communicator 0000004d)"
    assert faults_found == [f"{first}, and rank 1 {expected}"]


def test_a_job_that_was_ended(tmp_path: Path) -> None:
    """Ranks may have stopped at different calls, with their memory and half a line; an order that differs is one."""
    stopped = rank_log(1, nccl("AllReduce"))[:-1]
    first = rank_log(0, nccl("AllReduce"), nccl("AllReduce"), nccl("Send", peer=1), device_bytes=5)
    assert found(tmp_path, first, stopped, ends_well=False) == []
    (tmp_path / "101.jsonl").open("a").write('{"thread": 1, "ma')
    assert faults(read_logs(tmp_path), ends_well=False) == []
    other = rank_log(1, nccl("AllGather"))[:-1]
    assert len(found(tmp_path, first, other, ends_well=False)) == 1


def test_messages(tmp_path: Path) -> None:
    """What is sent is received, in its order, whatever else the ranks do between."""
    sends = [nccl("Send", 3, peer=0), nccl("Send", 5, peer=0)]
    receives = [nccl("Recv", 5, peer=1), nccl("Recv", 3, peer=1)]
    expected = "message 0 from rank 1 to rank 0: sent 3 x float32, received 5 x float32"
    assert found(tmp_path, rank_log(0, *receives), rank_log(1, *sends)) == [expected]
    expected = "message 1 from rank 1 to rank 0: sent 5 x float32, received nothing"
    assert found(tmp_path, rank_log(0, receives[1]), rank_log(1, *sends)) == [expected]


def test_contexts(tmp_path: Path) -> None:
    """A second context in a process, and one GPU for two ranks, which may be wanted."""
    stray = event("context", device=0, is_main=False, by="cudaSetDevice", name="python")
    expected = "rank 1 has GPU 1, and makes a context on 0 too, by cudaSetDevice (python)"
    assert found(tmp_path, rank_log(0), rank_log(1, stray)) == [expected]
    of_torch = {**stray, "name": "pt_nccl_heartbt"}
    assert len(found(tmp_path, rank_log(0), rank_log(1, of_torch))) == 1
    assert found(tmp_path, rank_log(0), rank_log(1, of_torch), ends_well=False) == []
    shared = [{**one, "device": 0} for one in rank_log(1)]
    assert found(tmp_path, rank_log(0), shared) == ["rank 1 and rank 0 are both on GPU 0"]
    assert found(tmp_path, rank_log(0), shared, shares_devices=True) == []


def test_calls_that_are_wrong_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names the rank and the thread; the program prints them."""
    calls = [
        event("forbidden", call="cudaMalloc", own=False, is_main=False),
        event("kernel", name="sort"),
        event("unmodelled", name="aten::sort"),
    ]
    expected = [
        "rank 0 (thread 1) calls cudaMalloc, which a recording forbids",
        "rank 0 (main thread) launches sort, which the fake does not run",
        "rank 0 (main thread) does what the fake does not: aten::sort",
    ]
    assert found(tmp_path, rank_log(0, *calls), rank_log(1)) == expected
    assert main(str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines() == expected


def test_memory_at_the_end(tmp_path: Path) -> None:
    """Every kind counts; what a process may keep does not."""
    kept = rank_log(0, device_bytes=2, pinned_bytes=9, registered_bytes=4, mapped_bytes=3)
    expected = "rank 0 kept 2 device bytes, 9 pinned bytes, 4 registered bytes, 3 mapped bytes"
    assert found(tmp_path, kept, rank_log(1)) == [expected]
    assert found(tmp_path, rank_log(0, pinned_bytes=9), rank_log(1), pinned_bytes=9) == []


def recorded(graph: int, others: int, num_bytes: int) -> list[dict[str, Any]]:
    """A recording beside others."""
    return [event("capture", graph=graph, others=others), event("captured", graph=graph, nodes=1, bytes=num_bytes)]


def test_recordings_share_their_memory(tmp_path: Path) -> None:
    """Trials, those that run, and those after a sleep: few of each take memory, and none is kept."""
    run = event("replay", graph=3)
    first, second = [*recorded(0, 0, 9), *recorded(1, 1, 0)], [*recorded(2, 0, 9), *recorded(3, 1, 0)]
    assert found(tmp_path, rank_log(0, *first, *second, run, *first, run)) == []
    kept = found(tmp_path, rank_log(0, *first, run, *recorded(2, 2, 0), *recorded(3, 3, 0)))
    assert kept == ["rank 0 makes recordings beside 2 that have run"]
    apart = found(tmp_path, rank_log(0, *recorded(0, 0, 9), *recorded(1, 1, 9), *recorded(2, 2, 9)))
    assert apart == ["rank 0 has recordings that do not share their memory"]


def test_processes_that_are_killed(tmp_path: Path) -> None:
    """The one that tries kernels, by the last word of its command line; another one must end by itself."""
    tries, other = "tp_engine.worker.tuning.trial_process", "tp_engine.engine.rank_process"
    context = event("context", by="cudaSetDevice", name="python")
    begins = [{"event": "process", "name": tries}, context]
    assert found(tmp_path, rank_log(0), rank_log(1), begins) == []
    assert found(tmp_path, rank_log(0), rank_log(1), [*begins, event("kernel", name="sort")]) == [
        "process 102 (main thread) launches sort, which the fake does not run"
    ]
    begins[0] = {"event": "process", "name": other}
    assert found(tmp_path, rank_log(0), rank_log(1), begins) == ["process 102 did not end by itself"]


def test_reserved_memory(tmp_path: Path) -> None:
    """What the last recordings take, and not their trials: the ledger has reserved as much, or more."""
    trial, last = recorded(0, 0, 900), [*recorded(1, 0, 20), *recorded(2, 1, 3)]
    found(tmp_path, rank_log(0, *trial, *last), rank_log(1))
    for reserved, faults_found in ((23, []), (22, ["rank 0 has reserved 22 bytes for recordings that take 23"])):
        line = f'12:00:00 INFO [rank 0] memory: {{"rank": 0, "cuda_graphs": {reserved}}}\nready\n'
        assert ledger_faults(read_logs(tmp_path), line) == faults_found
    assert ledger_faults(read_logs(tmp_path), "ready\n") == []


def test_handles_at_the_end(tmp_path: Path) -> None:
    """Events and recordings; a job that was ended may hold anything."""
    none = event("held", events=0, graphs=0)
    assert found(tmp_path, rank_log(0, none), rank_log(1)) == []
    some = event("held", events=23, graphs=1)
    assert found(tmp_path, rank_log(0, none), rank_log(1, some)) == ["rank 1 still has 23 events, 1 graphs"]
    assert found(tmp_path, rank_log(0, none), rank_log(1, some), ends_well=False) == []
