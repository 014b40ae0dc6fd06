"""Building and caching the native kernels: a compiler that fails, a damaged or shared cache, the off switch."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tp_engine.cpu import build, library
from tp_engine.cpu.build import BuildError, built_library, is_intact
from tp_engine.cpu.library import native_library
from tp_engine.cpu.prototypes import players, prototypes
from tp_engine.job.progress import hearing_progress, tell_progress
from tp_engine.kernels import compile_turn
from tp_engine.kernels.ops import OPS, is_recordable, op
from tp_engine.system import env

ROOT = Path(__file__).parents[3]
# Writes its arguments to the file after -o, and a line per call to a log beside itself.
COMPILER = """#!/bin/sh
echo call >> "$(dirname "$0")/calls"
all="$*"
while [ "$1" != -o ]; do shift; done
echo "$all" > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the C compiler, first in PATH, and an empty cache folder."""
    path = tmp_path / "bin" / "cc"
    path.parent.mkdir()
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return path


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """No choice of implementation remains from before, in this test and after it."""
    for chosen in (native_library, op, is_recordable):
        chosen.cache_clear()
    yield
    for chosen in (native_library, op, is_recordable):
        chosen.cache_clear()


def calls_of(compiler: Path) -> int:
    log = compiler.parent / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_it_is_compiled_once(compiler: Path) -> None:
    """Oracle: the compiler's own log; the library names the OpenMP runtime, and the folder has no other file."""
    runtime = Path("/some/libgomp.so.1")
    path = built_library(runtime)
    assert is_intact(path) and str(runtime) in path.read_bytes().decode(errors="replace")
    assert calls_of(compiler) == len(build.SOURCES) + 1
    assert built_library(runtime) == path and calls_of(compiler) == len(build.SOURCES) + 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_key_covers_runtime_and_compiler(compiler: Path) -> None:
    """Oracle: another runtime and another compiler give another file."""
    first = built_library(Path("/some/libgomp.so.1"))
    second = built_library(Path("/some/libiomp5.so"))
    compiler.write_text(COMPILER + "# another version\n")
    third = built_library(Path("/some/libgomp.so.1"))
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_file_is_compiled_again(compiler: Path, damage: str) -> None:
    """Oracle: the file before the damage."""
    path = built_library(Path("/some/libgomp.so.1"))
    whole = path.read_bytes()
    damaged = {"flipped": bytes([whole[0] ^ 1]) + whole[1:], "short": whole[:-7], "empty": b""}[damage]
    path.write_bytes(damaged)
    assert not is_intact(path)
    assert built_library(Path("/some/libgomp.so.1")) == path
    assert is_intact(path)


def test_processes_may_compile_at_the_same_time(compiler: Path) -> None:
    """Oracle: all get the one whole file, there is no other, and the compiler's log: one process has compiled."""
    compiler.write_text(COMPILER.replace("#!/bin/sh", "#!/bin/sh\nsleep 0.2"))
    script = (
        "from pathlib import Path; from tp_engine.cpu.build import built_library; "
        "print(built_library(Path('/some/libgomp.so.1')))"
    )
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {Path(process.communicate(timeout=60)[0].strip()) for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(paths) == 1
    path = paths.pop()
    assert is_intact(path) and list(path.parent.iterdir()) == [path]
    assert calls_of(compiler) == len(build.SOURCES) + 1


def hold(path: Path, text: str) -> int:
    """A lock file as another process that compiles would hold it."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.pwrite(descriptor, text.encode(), 0)
    return descriptor


def test_a_process_that_hangs_is_named_and_left_behind(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the file; the log names the process that holds the lock, and since when.  Where a second one hangs too,
    the error says so, and nothing is waited for longer than that."""
    monkeypatch.setattr(compile_turn, "STALL_S", 0.2)
    path = built_library(Path("/some/libgomp.so.1"))
    path.unlink()
    holders = [hold(Path(f"{path}.lock"), "process 77 on beta, since 12:03:10, 3 of 17 files")]
    with caplog.at_level(logging.INFO):
        assert built_library(Path("/some/libgomp.so.1")) == path and is_intact(path)
    text = caplog.text
    assert "waiting for the CPU kernels, made by process 77 on beta, since 12:03:10, 3 of 17 files" in text
    assert "not waiting any longer for the CPU kernels, made by process 77" in text
    path.unlink()
    holders.append(hold(Path(f"{path}.lock-2"), "process 78 on beta, since 12:05:10, has begun"))
    with pytest.raises(BuildError, match="two other processes seem to hang"):
        built_library(Path("/some/libgomp.so.1"))
    for holder in holders:
        os.close(holder)


def test_a_process_that_gets_ahead_is_waited_for(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the other process's file, which comes long after the limit for one that gets no further."""
    monkeypatch.setattr(compile_turn, "STALL_S", 1.0)
    path = built_library(Path("/some/libgomp.so.1"))
    content, calls = path.read_bytes(), calls_of(compiler)
    path.unlink()
    holder = hold(Path(f"{path}.lock"), "process 77")

    def compile_slowly() -> None:
        for number in range(8):
            time.sleep(0.2)
            os.pwrite(holder, f"process 77, {number} of 8 files".encode(), 0)
        (path.parent / "new").write_bytes(content)
        (path.parent / "new").replace(path)

    other = threading.Thread(target=compile_slowly)
    other.start()
    assert built_library(Path("/some/libgomp.so.1")) == path and calls_of(compiler) == calls
    other.join()
    os.close(holder)


def test_a_lock_of_a_process_that_was_killed_is_taken(compiler: Path) -> None:
    """Oracle: the file, at once: the kernel drops a lock with its process, whatever the file still says."""
    path = built_library(Path("/some/libgomp.so.1"))
    path.unlink()
    Path(f"{path}.lock").write_text("process 77 on beta, since 12:03:10, 3 of 17 files")
    assert built_library(Path("/some/libgomp.so.1")) == path and list(path.parent.iterdir()) == [path]


def test_progress_is_told(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a line at the beginning and at the end, and every file for those who listen."""
    told: list[str] = []
    with caplog.at_level(logging.INFO), hearing_progress(told.append):
        built_library(Path("/some/libgomp.so.1"))
    number = len(build.SOURCES)
    assert f"once for this machine: {number} files of C" in caplog.text
    assert "compiled the CPU kernels in" in caplog.text
    assert told == [f"compiling the CPU kernels: {done} of {number} files" for done in range(1, number + 1)]
    tell_progress("nobody listens")


def test_a_compiler_that_does_not_end(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the limit and the remedy."""
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.2)
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(BuildError, match=r"cc had not ended after 0 s; start once while"):
        built_library(Path("/some/libgomp.so.1"))


def test_a_compiler_that_fails(compiler: Path) -> None:
    """Oracle: the compiler's message; the cache stays empty."""
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    with pytest.raises(BuildError, match="no such flag"):
        built_library(Path("/some/libgomp.so.1"))
    assert not [path for path in env.cache_dir().rglob("*") if not path.is_dir()]


def test_a_folder_that_can_not_be_written(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the folder and the remedy."""
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(BuildError, match=r"cannot write to /proc/nowhere/code-.*set TP_ENGINE_CACHE_DIR"):
        built_library(Path("/some/libgomp.so.1"))


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("reason", ["no compiler", "fails", "no library", "wrong results", "switched off"])
def test_pytorch_computes_where_there_are_no_kernels(
    reason: str, compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: one line in the log that there are none, and PyTorch's operations."""
    said = {
        "no compiler": "there is no C compiler; install gcc",
        "fails": "bad luck",
        "no library": "no native CPU kernels",  # the stand-in's output cannot be loaded
        "wrong results": "norm in torch.float32 differs",
        "switched off": "switched off by TP_ENGINE_NATIVE",
    }[reason]
    if reason == "no compiler":
        monkeypatch.setenv("PATH", str(compiler.parent / "none"))
    elif reason == "fails":
        compiler.write_text("#!/bin/sh\necho bad luck >&2\nexit 1\n")
    elif reason == "wrong results":
        monkeypatch.setattr(library, "built_library", lambda openmp: Path("any"))
        monkeypatch.setattr(library, "_load", lambda path: None)
        monkeypatch.setattr(library, "disagreement", lambda found: said)
    elif reason == "switched off":
        monkeypatch.setenv("TP_ENGINE_NATIVE", "0")
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        assert native_library() is None
        assert native_library() is None
        assert all(op(name, "cpu") is entry.twin for name, entry in OPS.items())
        assert not any(is_recordable(name, "cpu") for name in OPS)
    found = [text for text in caplog.messages if not text.startswith(("compiling", "compiled"))]
    assert len(found) == 1 and said in found[0]


def test_the_kernels_are_compiled_where_there_is_a_compiler() -> None:
    """Oracle: the compiler in PATH: with one, C sources that do not compile, or compute other numbers than PyTorch,
    are a failure, while the tests of the kernels would only be skipped."""
    if env.NATIVE_KERNELS.read() == "0":
        pytest.skip("the native kernels are switched off by TP_ENGINE_NATIVE")
    try:
        build._find_compiler()
    except BuildError:
        pytest.skip("there is no C compiler")
    assert native_library() is not None, "the log says what is wrong with the kernels"


def test_a_function_that_two_files_define_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: two sources by hand; such kernels could not be linked, and PyTorch would compute instead."""
    for name in ("one.c", "two.c"):
        (tmp_path / name).write_text("int twice(void)\n{\n    return 0;\n}\n")
    monkeypatch.setattr("tp_engine.cpu.prototypes.FOLDER", tmp_path)
    with pytest.raises(AssertionError, match="two C files define twice"):
        prototypes.__wrapped__()


def test_a_tape_has_room_for_every_function_that_it_may_hold() -> None:
    """Oracle: MAX_WORDS of tape.h; the player of ``add_scaled``, written out."""
    room = int((Path(build.__file__).parent / "tape.h").read_text().partition("MAX_WORDS = ")[2].partition(" ")[0])
    taped = [one for one in prototypes() if one.is_taped]
    assert len(taped) > 30 and max(len(one.parameters) for one in taped) <= room
    assert players().count("\nint play_") == len(taped)
    words = "a[0].pointer, a[1].pointer, a[2].integer, a[3].number, a[4].number, a[5].integer, a[6].integer"
    assert f"int play_add_scaled(const Word *a) {{ return add_scaled({words}); }}" in players()


def test_a_library_that_others_could_write_is_not_loaded(compiler: Path, tmp_path: Path) -> None:
    """By hand: the folder in a shared cache belongs to this user alone, or there is no library, with the remedy."""
    openmp = Path("/some/libgomp.so.1")
    shared = tmp_path / "cache"
    shared.mkdir()
    shared.chmod(0o1777)
    folder = built_library(openmp).parent
    assert folder.parent == shared and folder.stat().st_mode & 0o077 == 0
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        with pytest.raises(BuildError, match=r"nobody else can write to: remove it, or set TP_ENGINE_CACHE_DIR"):
            built_library(openmp)
    folder.chmod(0o755)
    built_library(openmp)
    folder.rename(shared / "moved")
    folder.symlink_to("moved")
    with pytest.raises(BuildError, match="belongs to user"):
        built_library(openmp)


def test_a_library_of_another_user_is_not_loaded(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the folder's name is another user's, its owner is this one."""
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(BuildError, match=r"code-65534 belongs to user \d+ with mode 700; it must be .* user 65534"):
        built_library(Path("/some/libgomp.so.1"))
