"""Files that come over a network are read before their pages are touched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tp_engine.job.topology import RankInfo
from tp_engine.system.files import file_system_of
from tp_engine.weights import read_ahead
from tp_engine.weights.read_ahead import is_far, reading_ahead

MOUNTS = r"""22 1 8:1 / / rw - ext4 /dev/sda1 rw
40 22 0:50 / /models rw,relatime shared:1 - nfs4 server:/models rw,vers=4.2
41 40 0:51 / /models/my\040own rw - tmpfs none rw
42 22 0:52 / /bucket rw - fuse.s3fs s3fs rw
43 22 8:2 / /hidden rw - lustre a rw
44 22 8:3 / /hidden rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_network"),
    [
        ("/home/user/model.safetensors", "ext4", False),
        ("/models/a/model.safetensors", "nfs4", True),
        ("/models2/model.safetensors", "ext4", False),
        ("/models/my own/model.safetensors", "tmpfs", False),
        ("/bucket/model.safetensors", "fuse.s3fs", True),
        ("/hidden/model.safetensors", "xfs", False),
    ],
)
def test_kinds_of_file_systems(tmp_path: Path, path: str, kind: str, is_network: bool) -> None:
    """Oracle: the table of mounts, read by hand: the longest mount point counts, of equal ones the last."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system_of(Path(path), mounts) == kind
    assert is_far(kind) == is_network
    assert file_system_of(Path(path), tmp_path / "absent") == ""


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is read: file, start, bytes; pieces have 10 bytes."""
    found: list[tuple[str, int, int]] = []
    read = os.preadv

    def noting(descriptor: int, rooms: list[bytearray], start: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        num_bytes = read(descriptor, rooms, start)
        found.append((name, start, num_bytes))
        return num_bytes

    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 10)
    monkeypatch.setattr(os, "preadv", noting)
    return found


def test_the_ranks_of_a_host_share_the_files(
    tmp_path: Path, pieces: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: every byte of both files once, whatever the number of ranks."""
    monkeypatch.setattr(read_ahead, "file_system_of", lambda path: "nfs")
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"x" * 25)
    files[1].write_bytes(b"y" * 30)
    for rank in range(2):
        info = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        with reading_ahead(files, info, free_bytes=1000):
            deadline_s = time.monotonic() + 20
            while len(pieces) < 3 * (rank + 1) and time.monotonic() < deadline_s:
                time.sleep(0.001)
    assert sorted(pieces) == [("a", 0, 10), ("a", 10, 10), ("a", 20, 5), ("b", 0, 10), ("b", 10, 10), ("b", 20, 10)]


@pytest.mark.parametrize(("kind", "free_bytes"), [("ext4", 1000), ("nfs", 24)])
def test_nothing_is_read_ahead_from_a_disk_or_without_room(
    tmp_path: Path, pieces: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, kind: str, free_bytes: int
) -> None:
    """Oracle: no read at all."""
    monkeypatch.setattr(read_ahead, "file_system_of", lambda path: kind)
    path = tmp_path / "a"
    path.write_bytes(b"x" * 25)
    with reading_ahead([path], RankInfo(), free_bytes=free_bytes):
        pass
    assert not pieces


def test_what_is_no_file_is_the_loaders_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no error and no wait for a missing file, a loop of links and a FIFO without a writer."""
    monkeypatch.setattr(read_ahead, "file_system_of", lambda path: "nfs")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo")
    with reading_ahead([tmp_path / name for name in ("absent", "loop", "fifo")], RankInfo(), free_bytes=1000):
        pass
