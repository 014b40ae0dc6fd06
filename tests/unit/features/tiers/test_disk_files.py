"""A rank's files of the disk tier, its threads, and the fingerprint."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from tp_engine import ConfigError
from tp_engine.config import EngineConfig
from tp_engine.errors import MemoryBudgetError
from tp_engine.features.tiers.codecs.base import BlockCopy
from tp_engine.features.tiers.disk_files import Identity, SlotFiles, choose_disk_slots, lock_directory
from tp_engine.features.tiers.disk_start import make_identity
from tp_engine.features.tiers.rank_disk import DiskTierWorker
from tp_engine.ipc.job_board import JobBoard
from tp_engine.job.tier_progress import TierProgressReader
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.candidates import DEFAULTS, MANY, Choices
from tp_engine.system.units import GIB
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.memory.kv_cache import KvCacheShape

CPU = torch.device("cpu")
SLOT_BYTES = 5000
OURS = Identity(b"f" * 16, {"weights": "a", "model": "b"})


def files(path: Path, num_slots: int = 8, identity: Identity = OURS, slot_bytes: int = SLOT_BYTES) -> SlotFiles:
    """Open files, whose store begins if there is none."""
    opened = SlotFiles(path, 0, num_slots, slot_bytes, identity)
    opened.begin(opened.store or "5" * 32, keeps=bool(opened.store))
    return opened


def content(seed: int) -> bytes:
    """Bytes of a slot."""
    return np.random.default_rng(seed).bytes(SLOT_BYTES)


def written(path: Path) -> None:
    """Slots 1 and 6 have contents 1 and 6 under serials 11 and 16."""
    opened = files(path)
    for slot in (1, 6):
        opened.write(slot, memoryview(content(slot)), 10 + slot)
    opened.close()


def read(opened: SlotFiles, slot: int) -> bytes | None:
    """What is in a slot, if it may be trusted."""
    target = bytearray(SLOT_BYTES)
    return bytes(target) if opened.read(slot, memoryview(target)) else None


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    """Oracle: the bytes; modes of directory and files; a larger and a smaller number of slots keep what fits."""
    path = tmp_path / "kv"
    os.close(lock_directory(path))
    written(path)
    for num_slots, last in ((8, content(6)), (20, content(6)), (4, None)):
        opened = files(path, num_slots)
        assert opened.serials[1] == 11 and read(opened, 1) == content(1) and read(opened, 0) is None
        assert (read(opened, 6) if num_slots > 6 else None) == last
        opened.close()
    assert path.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in path.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["rank-0.kv", "rank-0.index"])
def test_a_flipped_byte_is_found(name: str, tmp_path: Path) -> None:
    """Oracle: the file with a byte of slot 1, or of its entry, changed: it is not read, and empty from then on."""
    written(tmp_path)
    with (tmp_path / name).open("r+b") as file:
        file.seek(8192 + 32 + 9 if name.endswith("index") else 8192 + 4321)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    opened = files(tmp_path)
    assert read(opened, 1) is None and read(opened, 6) == content(6)
    opened.close()
    opened = files(tmp_path)
    assert opened.serials.tolist() == [0, 0, 0, 0, 0, 0, 16, 0]
    opened.close()


@pytest.mark.parametrize(
    ("identity", "slot_bytes", "words"),
    [
        (Identity(b"g" * 16, {"weights": "c", "model": "b"}), SLOT_BYTES, "other values: weights"),
        (Identity(b"g" * 16, {"weights": "a", "types": "b"}), SLOT_BYTES, "other values: model, types"),
        (OURS, 4000, "its slots have 5000 bytes, not 4000"),
    ],
)
def test_another_fingerprint_begins_empty(identity: Identity, slot_bytes: int, words: str, tmp_path: Path) -> None:
    """Oracle: the parts that differ by hand; the first identity finds nothing either afterwards."""
    written(tmp_path)
    other = SlotFiles(tmp_path, 0, 8, slot_bytes, identity)
    assert not other.store and words in other.difference and not other.serials.any()
    other.begin("6" * 32, keeps=False)
    other.close()
    again = SlotFiles(tmp_path, 0, 8, SLOT_BYTES, OURS)
    assert not again.store and not again.serials.any()
    again.close()


def test_files_that_are_no_files_of_ours_begin_empty(tmp_path: Path) -> None:
    """Oracle: bytes that are no JSON, and JSON of another format."""
    written(tmp_path)
    index = tmp_path / "rank-0.index"
    data = json.loads(index.read_bytes()[:8192].decode().strip())
    for header, words in ((b"\xff{", "cannot be read"), (msgspec.json.encode(data | {"format": 9}), "format is 9")):
        index.write_bytes(header.ljust(8192))
        opened = SlotFiles(tmp_path, 0, 8, SLOT_BYTES, OURS)
        assert not opened.store and words in opened.difference
        opened.close()


def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    """Oracle: the message names the directory and the remedy; after the first has gone the lock is free."""
    first = lock_directory(tmp_path)
    with pytest.raises(ConfigError, match="another engine uses; stop it, or give each engine a directory of its own"):
        lock_directory(tmp_path)
    os.close(first)
    os.close(lock_directory(tmp_path))


def test_a_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    """Oracle: a file in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk_path is .* cannot be used"):
        lock_directory(tmp_path / "file" / "kv")


def test_the_size_must_hold_a_block_and_be_free(tmp_path: Path) -> None:
    """Oracle: 2 slots of 8 KiB and 32 bytes on each of 2 ranks; less than one block, and more than any disk has."""
    fits = (8192 + 32) * 2 * 2 / GIB + 1e-12
    assert choose_disk_slots(tmp_path, fits, SLOT_BYTES, rank=0, world_size=2, local_world_size=2) == 2
    with pytest.raises(MemoryBudgetError, match="one block of a rank takes 8192 bytes; raise it to at least"):
        choose_disk_slots(tmp_path, 1e-6, SLOT_BYTES, rank=0, world_size=2, local_world_size=2)
    with pytest.raises(MemoryBudgetError, match=r"what is free .* lower it to at most"):
        choose_disk_slots(tmp_path, 1e9, SLOT_BYTES, rank=1, world_size=2, local_world_size=2)


def test_files_that_could_not_be_opened_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the second attempt, in the same process, does not meet the first one's lock or descriptors."""
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(MemoryBudgetError, match=r"cannot reserve .* lower kv_disk_size"):
            files(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    files(tmp_path).close()


def failing(*_: object) -> None:
    """A file system without room."""
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk_path": "d", "kv_disk_size": 1}, "kv_offloading_size is 0.*set kv_offloading_size"),
        ({"kv_disk_path": "d", "kv_offloading_size": 1}, "a disk tier needs both"),
        ({"kv_disk_size": 1, "kv_offloading_size": 1}, "a disk tier needs both"),
        ({"kv_disk_size": -1}, "kv_disk_size is -1"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: dict[str, object], words: str) -> None:
    """Oracle: the rules of the options."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_several_hosts_are_refused(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the message names the option, the rule and the number of hosts."""
    config = EngineConfig(
        model=str(checkpoint("qwen3", num_kv_heads=4)), device="cpu", tensor_parallel_size=2, kv_offloading_size=1,
        kv_disk_path="d", kv_disk_size=1,
    )  # fmt: skip
    resolve(config)
    with pytest.raises(ConfigError, match=r"kv_disk_path is 'd', and a disk tier is for ranks on one host, .* on 2"):
        resolve(config, num_hosts=2)


def test_threads_read_and_write_in_the_order_of_plans(tmp_path: Path) -> None:
    """By hand: a write begins when its plan's moves have ended; a read of an empty slot fails, and is reported so."""
    board = JobBoard.create(1).slots[0]
    slots = np.zeros((4, SLOT_BYTES), dtype=np.uint8)
    slots[2] = np.frombuffer(content(2), np.uint8)
    tier = DiskTierWorker(slots, files(tmp_path), board.tier_progress(), first_serial=40, device=CPU)
    readers = {name: TierProgressReader([words]) for name, words in board.channels.items()}
    moved = threading.Event()
    none = np.empty((0, 2), dtype=np.int32)
    tier.begin(none, np.array([[2, 5]], dtype=np.int32), moved.wait)
    time.sleep(0.05)
    assert readers["disk_writes"].poll().ended == 0
    moved.set()
    wait_for(lambda: readers["disk_writes"].poll().ended == 1)
    tier.begin(np.array([[5, 0], [1, 1]], dtype=np.int32), none, lambda: None)
    failed: list[int] = []

    def has_read() -> bool:
        report = readers["disk_reads"].poll()
        failed.extend(report.failed)
        return report.ended == 2

    wait_for(has_read)
    assert failed == [2]
    assert slots[0].tobytes() == content(2) and tier.counters.read_bytes == 2 * SLOT_BYTES
    tier.close()
    opened = files(tmp_path)
    assert opened.serials[5] == 40
    opened.close()


def test_a_disk_that_hangs_holds_up_nothing() -> None:
    """Oracle: files whose reads never end: ``begin`` returns at once, writes go on, and ``close`` ends in time.

    When the read ends after all, the files are closed.
    """
    never, closed = threading.Event(), threading.Event()

    class Hanging:
        def read(self, slot: int, target: memoryview) -> bool:
            return never.wait()

        def write(self, slot: int, source: memoryview, serial: int) -> None:
            if slot == 7:
                raise OSError(28, "No space left on device")

        def close(self) -> None:
            assert never.is_set(), "a file is closed while a thread uses it"
            closed.set()

    board = JobBoard.create(1).slots[0]
    tier = DiskTierWorker(
        np.zeros((4, 8), dtype=np.uint8), cast(Any, Hanging()), board.tier_progress(), first_serial=1, device=CPU
    )
    pairs = np.array([[0, 3], [1, 7]], dtype=np.int32)
    tier.begin(pairs[:1], pairs, lambda: None)
    reader = TierProgressReader([board.channels["disk_writes"]])
    wait_for(lambda: board.channels["disk_writes"][0] & 0xFF == 2)
    assert reader.poll() == (2, (2,))
    started_s = time.monotonic()
    tier.close()
    assert time.monotonic() - started_s < 5 and not closed.is_set()
    never.set()
    assert closed.wait(20)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds, 20 s at most."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_each_part_of_the_fingerprint_counts(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the same folder twice, then one change each: a weight, rope, type, block size, rank, number of ranks,
    choice of kernels."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3", num_kv_heads=4), folder)

    def parts(info: RankInfo | None = None, choices: Choices = DEFAULTS, **options: object) -> dict[str, str]:
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **options)  # type: ignore[arg-type]
        effective = dataclasses.replace(resolve(config), choices=choices)
        layout = effective.model.kv_layout_on(1)
        shape = KvCacheShape(layout=layout, block_size=config.block_size, dtype=effective.kv_cache_dtype)
        found = make_identity(effective, info or RankInfo(), shape, ["torch"], codec=codec)
        assert len(found.fingerprint) == 16
        whole.add(found.fingerprint)
        return found.parts

    whole, codec = set[bytes](), BlockCopy(64, "rows")
    first = parts()
    assert parts() == first and len(whole) == 1
    changes: list[tuple[str, dict[str, str]]] = [
        ("ranks", parts(RankInfo(rank=1, world_size=2))),
        ("layout", parts(block_size=32)),
        ("types layout", parts(kv_cache_dtype="int8")),
        ("model", parts(max_model_len=64)),
        ("kernel", parts(choices=Choices({"int8_linear": ((MANY, "panels"),)}))),
    ]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0, "rope_parameters": None}))
    changes.append(("model", parts()))
    (folder / "config.json").write_text(json.dumps(config))
    weights = next(folder.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changes.append(("weights", parts()))
    for name, found in changes:
        assert {one for one in found if found[one] != first[one]} == set(name.split())
    assert len(whole) == 8
