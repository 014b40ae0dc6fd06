"""The ring's shared memory: no other process can open it, and it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tp_engine.errors import RankError
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.ipc.segment import SHM_FOLDER

TIMEOUT_S = 100.0


def test_a_ring_has_no_name_and_is_shared_until_all_have_attached() -> None:
    """Oracle: the folder's listing; the mode keeps other users out; a late reader gets an error that says so."""
    before = set(SHM_FOLDER.iterdir())
    writer = RingWriter(1)
    pid, descriptor, _ = writer.name.split(":")
    file = Path(f"/proc/{pid}/fd/{descriptor}").stat()
    assert not [path for path in set(SHM_FOLDER.iterdir()) - before if path.stat().st_ino == file.st_ino]
    assert file.st_mode & 0o777 == 0o600 and file.st_nlink == 0
    assert file.st_size < 5 << 20
    reader = RingReader(writer.name, 0)
    writer.wait_attached(1.0)
    with pytest.raises(RankError, match=r"rank 0: its shared memory .* is gone"):
        RingReader(writer.name, 0)
    for end in (writer, writer, reader):
        end.close()


def test_a_descriptor_that_belongs_to_another_file_is_not_opened() -> None:
    """Oracle: the descriptor's number now belongs to a pipe; opening a pipe could wait forever."""
    writer = RingWriter(1)
    pid, descriptor, _ = writer.name.split(":")
    reading, writing = os.pipe()
    with pytest.raises(RankError, match="is gone"):
        RingReader(f"{pid}:{reading}:{os.fstat(int(descriptor)).st_ino}", 0)
    for end in (reading, writing):
        os.close(end)
    writer.close()


def test_a_writer_that_is_killed_is_noticed() -> None:
    """Oracle: the segment lives on for its reader, which gets an error; there is no name to leave behind."""
    code = "from tp_engine.ipc.ring_buffer import RingWriter; r = RingWriter(2); print(r.name, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        reader = RingReader(name, 0, alive=lambda: process.poll() is None)
        process.kill()
        with pytest.raises(RankError, match="its process is gone"):
            reader.read(TIMEOUT_S)
        reader.close()
    with pytest.raises(RankError, match="is gone"):
        RingReader(name, 1)


def test_too_small_shared_memory_is_a_clear_error() -> None:
    """Oracle: a private /dev/shm of 1 MiB; the error has both byte counts, no name remains, and a small ring fits."""
    code = (
        "import os\n"
        "from tp_engine.ipc.ring_buffer import RingWriter\n"
        "try:\n"
        "    RingWriter(1)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "print(os.listdir('/dev/shm'))\n"
        "RingWriter(1, num_slots=8).close()\n"
    )
    command = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -"]
    try:
        probe = subprocess.run([*command[:-1], "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode != 0:
        pytest.skip("this machine does not let a user mount a private /dev/shm with unshare")
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    error, listing = done.stdout.splitlines()
    needed = 64 * 65536 + 64 + 3 * 64
    assert f"needs {needed} bytes and 1048576 are available" in error
    assert listing == "[]"


def test_no_descriptor_or_mapping_is_left() -> None:
    """Oracle: /proc of this process before and after a hundred rings."""

    def held() -> tuple[int, int]:
        maps = Path(f"/proc/{os.getpid()}/maps").read_text()
        return psutil.Process().num_fds(), maps.count("/dev/shm/")

    before = held()
    for _ in range(100):
        writer = RingWriter(1, num_slots=2, slot_bytes=64)
        reader = RingReader(writer.name, 0)
        reader.close()
        writer.close()
    assert held() == before
