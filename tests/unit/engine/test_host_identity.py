"""What the hosts of a job must agree on, and how they are counted and found."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tp_engine
from tp_engine.config import EngineConfig
from tp_engine.distributed.store import host_store
from tp_engine.engine.hosts import Hosts, identity_of, topology_of
from tp_engine.engine.job import Job
from tp_engine.errors import ConfigError, RankError
from tp_engine.ipc.handshake import differences
from tp_engine.ipc.job_board import JobBoard
from tp_engine.system.env import LaunchedRank
from tp_engine.system.interfaces import address_towards, interface_of, is_loopback
from tp_engine.weights.fingerprint import checkpoint_fingerprint
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.tuning.table import TunedTable, write_pinned


def launched(rank: int, *, world_size: int, here: int, local_rank: int, num_hosts: int) -> LaunchedRank:
    return LaunchedRank(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=here,
        master_addr="127.0.0.1", master_port=1, num_hosts=num_hosts,
    )  # fmt: skip


def test_hosts_are_counted() -> None:
    """Oracle: rank 5 of 3 hosts with 2 ranks each; one host, whose launcher does not say how many there are."""
    topology = topology_of(launched(5, world_size=6, here=2, local_rank=1, num_hosts=3))
    assert (topology.num_hosts, topology.host_of(5), topology.leader_of(2), list(topology.far_hosts)) == (
        3,
        2,
        4,
        [1, 2],
    )
    assert topology.is_leader(4) and not topology.is_leader(5) and topology.named(5) == "rank 5 (host 2)"
    alone = topology_of(launched(1, world_size=2, here=2, local_rank=1, num_hosts=0))
    assert alone.num_hosts == 1 and alone.named(1) == "rank 1"


@pytest.mark.parametrize(
    ("rank", "world_size", "here", "local_rank", "num_hosts"),
    [(0, 3, 2, 0, 2), (2, 3, 1, 0, 2), (1, 4, 1, 0, 2), (3, 5, 2, 0, 0)],
)
def test_hosts_of_different_sizes_are_refused(
    rank: int, world_size: int, here: int, local_rank: int, num_hosts: int
) -> None:
    """Oracle: both numbers and the remedy, seen from the larger host and from the smaller one."""
    with pytest.raises(
        ConfigError, match=rf"started {world_size} ranks, {here} of them on this host.*--nproc-per-node"
    ):
        topology_of(launched(rank, world_size=world_size, here=here, local_rank=local_rank, num_hosts=num_hosts))


def identity(**options: Any) -> dict[str, str]:
    return identity_of(resolve(EngineConfig(device="cpu", **options)))


def test_what_hosts_must_agree_on(tmp_path: Path) -> None:
    """Oracle: versions, weights, kind of device and every option, except for paths and habits of one host."""
    model = tp_engine.config.DEMO_MODEL
    copied = shutil.copytree(model, tmp_path / "copied")
    first = identity()
    assert first["tp_engine"] == tp_engine.__version__ and first["torch"] == torch.__version__
    assert {field.name for field in dataclasses.fields(EngineConfig)} - first.keys() == {
        "model", "tokenizer", "log_format", "flight_recorder_dir", "profile", "device_ids", "kv_disk_path",
        "kv_events_config", "lora_modules", "allowed_local_media_path",
    }  # fmt: skip
    assert differences(first, identity(model=str(copied), flight_recorder_dir="elsewhere"), 1) == []
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    for path in (here, there):
        write_pinned(path, TunedTable(device={}, shapes=()))
    assert differences(identity(tuned=here), identity(tuned=there), 1) == []
    assert differences(first, identity(tuned=here), 1) == ["tuned is none on host 0 and a file on host 1"]
    weights = next(copied.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the last place that is sampled
    weights.write_bytes(data)
    found = differences(first, identity(model=str(copied), seed=5), 1)
    assert [line.split()[0] for line in found] == ["seed", "weights"] and found[
        0
    ] == "seed is 0 on host 0 and 5 on host 1"


def test_hosts_describe_the_model_alike() -> None:
    """Oracle: the fields of a description that count where models are compared, and the version that gave it."""
    found = resolve(EngineConfig(device="cpu"))

    def with_model(**changes: Any) -> dict[str, str]:
        return identity_of(dataclasses.replace(found, model=dataclasses.replace(found.model, **changes)))

    first = identity_of(found)
    assert first["transformers"] == "not asked" and differences(first, with_model(notes=("a note",)), 1) == []
    (line,) = differences(first, with_model(logit_scale=2.0), 1)
    assert line.startswith("model's description is ")
    (line,) = differences(first, with_model(described_by="transformers"), 1)
    assert line == f"transformers is not asked on host 0 and {importlib.metadata.version('transformers')} on host 1"


def test_fingerprints(tmp_path: Path) -> None:
    """Oracle: a copy has the same one; another header, size, name or config.json has another."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    (folder / "config.json").write_text("{}")
    first = checkpoint_fingerprint(folder)
    assert first == checkpoint_fingerprint(shutil.copytree(folder, tmp_path / "b")) and len(first) == 16
    found = {first}
    changes: list[Callable[[Path], object]] = [
        lambda made: (made / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"\0"),
        lambda made: (made / "model.safetensors").rename(made / "other.safetensors"),
        lambda made: (made / "config.json").write_text('{"a": 1}'),
        lambda made: (made / "notes.txt").write_text("not a part of the model"),
    ]
    for name, change in enumerate(changes):
        made = shutil.copytree(folder, tmp_path / str(name))
        change(made)
        found.add(checkpoint_fingerprint(made))
    assert len(found) == 4  # the notes do not count


def test_addresses_and_interfaces() -> None:
    """Oracle: the loopback."""
    assert address_towards("127.0.0.1", 1) == "127.0.0.1" and is_loopback("127.0.0.1") and is_loopback("::1")
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.77") is None
    assert not is_loopback("203.0.113.77") and not is_loopback("fe80::1%eth0")


class FakeJob:
    """The job of rank 0 over two hosts with two ranks each, of which the second one never comes."""

    def __init__(self) -> None:
        self.board = JobBoard.create(4, local_world_size=2)
        self.rank = 0

    def check(self) -> None:
        failed = [slot for slot in self.board.slots if slot.failure_text]
        if failed:
            raise RankError(failed[0].rank, failed[0].failure_text)


def test_a_missing_host_is_named() -> None:
    """Oracle: its first rank and the limit; a failure that it left in the store instead, if it could."""
    store, job = host_store(timeout_s=10.0), cast(Job, FakeJob())
    hosts = Hosts(job, store, timeout_s=4.0)
    hosts.listen("127.0.0.1", {})
    try:
        with pytest.raises(RankError, match=r"rank 2: has not connected within 0\.05 s \(missing hosts: 1\)"):
            hosts.await_hosts(0.05)
        far = Hosts(cast(Job, FakeJob()), store, timeout_s=4.0)
        far._job.rank = 2
        far.tell_failure(ValueError("no such model"))
        with pytest.raises(RankError, match="rank 2: ValueError: no such model"):
            hosts.await_hosts(20.0)
    finally:
        hosts.close()
