"""Building and caching the native kernels: a compiler that fails, a damaged or shared cache, the off switch."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_engine.cpu import kernel_level, library
from tp_engine.cpu.compiling import shipped
from tp_engine.cpu.compiling.cache import compiled_library
from tp_engine.cpu.compiling.gcc import SOURCES, BuildError, find_compiler, is_intact, sources_digest
from tp_engine.cpu.compiling.levels import LEVELS, NATIVE, best_level, processor_flags, shippable_levels
from tp_engine.cpu.library import native_library
from tp_engine.cpu.prototypes import FOLDER, players, prototypes
from tp_engine.errors import ConfigError
from tp_engine.job.progress import hearing_progress, tell_progress
from tp_engine.kernels import compile_turn
from tp_engine.kernels.ops import OPS, is_recordable, op
from tp_engine.system import env

ROOT = Path(__file__).parents[3]
# Writes its arguments to the file after -o, and a line per call to a log beside itself.  Its macros are gcc's.
COMPILER = """#!/bin/sh
case "$*" in *-dM*) echo "#define __GNUC__ 12"; exit;; esac
echo call >> "$(dirname "$0")/calls"
all="$*"
while [ "$1" != -o ]; do shift; done
echo "$all" > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the C compiler, first in PATH, and an empty cache folder."""
    path = tmp_path / "bin" / "gcc"
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
    """Oracle: the compiler's own log; the library is linked to no OpenMP runtime, and the folder has no other file."""
    path = compiled_library(NATIVE)
    assert is_intact(path) and "-fopenmp" not in path.read_bytes().decode(errors="replace")
    assert calls_of(compiler) == len(SOURCES) + 1
    assert compiled_library(NATIVE) == path and calls_of(compiler) == len(SOURCES) + 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_key_covers_level_and_compiler(compiler: Path) -> None:
    """Oracle: another level and another compiler give another file; of a level, the name tells which."""
    first = compiled_library(NATIVE)
    second = compiled_library(LEVELS[0])
    compiler.write_text(COMPILER + "# another version\n")
    third = compiled_library(NATIVE)
    assert len({first, second, third}) == 3
    assert first.name.startswith("native-") and second.name.startswith(f"{LEVELS[0].name}-")


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_file_is_compiled_again(compiler: Path, damage: str) -> None:
    """Oracle: the file before the damage."""
    path = compiled_library(NATIVE)
    whole = path.read_bytes()
    damaged = {"flipped": bytes([whole[0] ^ 1]) + whole[1:], "short": whole[:-7], "empty": b""}[damage]
    path.write_bytes(damaged)
    assert not is_intact(path)
    assert compiled_library(NATIVE) == path
    assert is_intact(path)


def test_processes_may_compile_at_the_same_time(compiler: Path) -> None:
    """Oracle: all get the one whole file, there is no other, and the compiler's log: one process has compiled."""
    compiler.write_text(COMPILER.replace("#!/bin/sh", "#!/bin/sh\nsleep 0.2"))
    script = (
        "from tp_engine.cpu.compiling.cache import compiled_library; "
        "from tp_engine.cpu.compiling.levels import NATIVE; "
        "print(compiled_library(NATIVE))"
    )
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {Path(process.communicate(timeout=60)[0].strip()) for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(paths) == 1
    path = paths.pop()
    assert is_intact(path) and list(path.parent.iterdir()) == [path]
    assert calls_of(compiler) == len(SOURCES) + 1


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
    path = compiled_library(NATIVE)
    path.unlink()
    holders = [hold(Path(f"{path}.lock"), "process 77 on beta, since 12:03:10, 3 of 17 files")]
    with caplog.at_level(logging.INFO):
        assert compiled_library(NATIVE) == path and is_intact(path)
    text = caplog.text
    assert "waiting for the CPU kernels, made by process 77 on beta, since 12:03:10, 3 of 17 files" in text
    assert "not waiting any longer for the CPU kernels, made by process 77" in text
    path.unlink()
    holders.append(hold(Path(f"{path}.lock-2"), "process 78 on beta, since 12:05:10, has begun"))
    with pytest.raises(BuildError, match="two other processes seem to hang"):
        compiled_library(NATIVE)
    for holder in holders:
        os.close(holder)


def test_a_process_that_gets_ahead_is_waited_for(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the other process's file, which comes long after the limit for one that gets no further."""
    monkeypatch.setattr(compile_turn, "STALL_S", 1.0)
    path = compiled_library(NATIVE)
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
    assert compiled_library(NATIVE) == path and calls_of(compiler) == calls
    other.join()
    os.close(holder)


def test_a_lock_of_a_process_that_was_killed_is_taken(compiler: Path) -> None:
    """Oracle: the file, at once: the kernel drops a lock with its process, whatever the file still says."""
    path = compiled_library(NATIVE)
    path.unlink()
    Path(f"{path}.lock").write_text("process 77 on beta, since 12:03:10, 3 of 17 files")
    assert compiled_library(NATIVE) == path and list(path.parent.iterdir()) == [path]


def test_progress_is_told(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a line at the beginning and at the end, and every file for those who listen."""
    told: list[str] = []
    with caplog.at_level(logging.INFO), hearing_progress(lambda one: told.append(str(one))):
        compiled_library(NATIVE)
    number = len(SOURCES)
    assert f"compiling the CPU kernels (native), once for this machine: {number} files of C" in caplog.text
    assert "compiled the CPU kernels in" in caplog.text
    assert told == [f"compiling the CPU kernels: {done} of {number} files" for done in range(1, number + 1)]
    tell_progress("nobody listens")


def test_a_compiler_that_does_not_end(compiler: Path) -> None:
    """Oracle: the limit and the remedy."""
    compiler.write_text('#!/bin/sh\ncase "$*" in *-dM*) exit;; esac\nexec sleep 60\n')
    with pytest.raises(BuildError, match=r"gcc had not ended in time; start once while"):
        compiled_library(NATIVE, 0.5)


def test_a_compiler_that_fails(compiler: Path) -> None:
    """Oracle: the compiler's message; the cache stays empty."""
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    with pytest.raises(BuildError, match="no such flag"):
        compiled_library(NATIVE)
    assert not [path for path in env.cache_dir().rglob("*") if not path.is_dir()]


def test_a_folder_that_can_not_be_written(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the folder and the remedy."""
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(BuildError, match=r"cannot write to /proc/nowhere/code-.*set TP_ENGINE_CACHE_DIR"):
        compiled_library(NATIVE)


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("reason", ["no compiler", "fails", "no library", "wrong results", "switched off"])
def test_pytorch_computes_where_there_are_no_kernels(
    reason: str, compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: one line in the log that there are none, and PyTorch's operations."""
    said = {
        "no compiler": "there is no C compiler; install gcc",
        "fails": "bad luck",
        "no library": "PyTorch computes, 2 to 4 times slower",  # the stand-in's output cannot be loaded
        "wrong results": "norm in torch.float32 differs",
        "switched off": "switched off by TP_ENGINE_NATIVE",
    }[reason]
    if reason == "no compiler":
        monkeypatch.setenv("PATH", str(compiler.parent / "none"))
    elif reason == "fails":
        compiler.write_text("#!/bin/sh\necho bad luck >&2\nexit 1\n")
    elif reason == "wrong results":
        monkeypatch.setattr(library, "compiled_library", lambda level: Path("any"))
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
        find_compiler()
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
    room = int((FOLDER / "tape.h").read_text().partition("MAX_WORDS = ")[2].partition(" ")[0])
    taped = [one for one in prototypes() if one.is_taped]
    assert len(taped) > 30 and max(len(one.parameters) for one in taped) <= room
    assert players().count("\nint play_") == len(taped)
    words = "a[0].pointer, a[1].pointer, a[2].integer, a[3].number, a[4].number, a[5].integer, a[6].integer"
    assert f"int play_add_scaled(const Word *a) {{ return add_scaled({words}); }}" in players()


def test_a_library_that_others_could_write_is_not_loaded(compiler: Path, tmp_path: Path) -> None:
    """By hand: the folder in a shared cache belongs to this user alone, or there is no library, with the remedy."""
    shared = tmp_path / "cache"
    shared.mkdir()
    shared.chmod(0o1777)
    folder = compiled_library(NATIVE).parent
    assert folder.parent == shared and folder.stat().st_mode & 0o077 == 0
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        with pytest.raises(BuildError, match=r"nobody else can write to: remove it, or set TP_ENGINE_CACHE_DIR"):
            compiled_library(NATIVE)
    folder.chmod(0o755)
    compiled_library(NATIVE)
    folder.rename(shared / "moved")
    folder.symlink_to("moved")
    with pytest.raises(BuildError, match="belongs to user"):
        compiled_library(NATIVE)


def test_a_library_of_another_user_is_not_loaded(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the folder's name is another user's, its owner is this one."""
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(BuildError, match=r"code-65534 belongs to user \d+ with mode 700; it must be .* user 65534"):
        compiled_library(NATIVE)


def test_it_needs_nothing_but_the_standard_library() -> None:
    """Oracle: a Python without site-packages, in which setup.py makes wheels."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tp_engine.cpu.compiling import __main__, shipped"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, timeout=60)


SKYLAKE = LEVELS[1].needs
HASWELL = LEVELS[2].needs


@pytest.mark.parametrize(
    ("flags", "machine", "name"),
    [
        (LEVELS[0].needs | {"amx_bf16"}, "x86_64", "v4-bf16"),
        (LEVELS[0].needs - {"avx512vbmi"}, "x86_64", "v4"),
        (SKYLAKE, "x86_64", "v4"),
        (SKYLAKE - {"avx512vl"}, "x86_64", "v3"),
        (SKYLAKE - {"fma"}, "x86_64", None),
        (HASWELL, "x86_64", "v3"),
        (HASWELL - {"avx2"}, "x86_64", None),
        (LEVELS[3].needs | {"bf16"}, "aarch64", "armv8.2"),
        (LEVELS[3].needs - {"asimdhp"}, "aarch64", None),
        (LEVELS[0].needs, "riscv64", None),
        (frozenset(), "x86_64", None),
    ],
)
def test_the_level_of_a_processor(flags: frozenset[str], machine: str, name: str | None) -> None:
    """By hand: flags as Linux names them; a level that a masked flag forbids is never chosen."""
    found = best_level(frozenset(flags), machine)
    assert (None if found is None else found.name) == name


def test_more_flags_never_mean_a_lower_level() -> None:
    """Oracle: the order of the table; each level of a machine needs what the next one does, and more."""
    levels = [one for one in LEVELS if one.machine == "x86_64"]
    assert all(better.needs > worse.needs for better, worse in pairwise(levels))


def test_the_flags_of_this_processor_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hand: the first processor of two, as x86 and as arm write them; none where there is no such file."""
    for name in ("flags", "Features"):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{name}\t: fma avx2\n\nprocessor : 1\n{name}\t: fma\n")
        monkeypatch.setattr("tp_engine.cpu.compiling.levels._CPUINFO", tmp_path / "cpuinfo")
        assert processor_flags.__wrapped__() == {"fma", "avx2"}
    monkeypatch.setattr("tp_engine.cpu.compiling.levels._CPUINFO", tmp_path / "none")
    assert processor_flags.__wrapped__() == frozenset()


@pytest.mark.usefixtures("fresh_choice")
def test_a_level_is_chosen_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the processor has; what it lacks, and what there is not, is refused by name and never loaded."""
    monkeypatch.setattr(library, "_load", lambda path: pytest.fail("loaded"))
    for wanted, message in (
        ("v9", r"TP_ENGINE_NATIVE is 'v9'; it must be 0, 1, .*native"),
        (shippable_levels()[-1].name, r"for processors with .*, which this one lacks; unset it"),
    ):
        monkeypatch.setenv("TP_ENGINE_NATIVE", wanted)
        monkeypatch.setattr(library, "processor_flags", frozenset)
        with pytest.raises(ConfigError, match=message):
            native_library()


@pytest.mark.usefixtures("fresh_choice")
def test_a_shipped_library_is_taken(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the file of a wheel, without a call of the compiler; one of other sources is passed by, a damaged one is
    named, and both are compiled instead."""
    level = shippable_levels()[0]
    monkeypatch.setattr(library, "_levels", lambda wanted: (level,))
    monkeypatch.setattr(shipped, "BUILT", tmp_path / "built")
    taken: list[Path] = []

    def load(path: Path) -> SimpleNamespace:
        taken.append(path)
        return SimpleNamespace()

    monkeypatch.setattr(library, "_load", load)
    monkeypatch.setattr(library, "disagreement", lambda found: None)
    compiled = compiled_library(level)
    calls = calls_of(compiler)
    shipped.ship([level], tmp_path / "built", lambda one: compiled)
    file = tmp_path / "built" / f"{level.name}-{sources_digest()}.so"
    assert kernel_level() == level.name and taken == [file] and calls_of(compiler) == calls
    file.write_bytes(file.read_bytes()[:-1])
    native_library.cache_clear()
    assert kernel_level() == level.name and taken[1:] == [compiled]
    assert f"{file} is damaged; install the package again" in caplog.text
    file.rename(file.with_name(f"{level.name}-0123456789abcdef.so"))
    native_library.cache_clear()
    assert kernel_level() == level.name and taken[2:] == [compiled]


def test_clang_alone_is_told(compiler: Path) -> None:
    """By hand: a compiler whose macros are clang's, as gcc and as cc."""
    for name in ("gcc", "cc"):
        (compiler.parent / name).write_text("#!/bin/sh\necho '#define __clang__ 1'\n")
        (compiler.parent / name).chmod(0o755)
    with pytest.raises(BuildError, match=r"no C compiler \(.*/cc is clang, .*\); install gcc"):
        compiled_library(NATIVE)


def test_what_a_killed_process_left_is_swept(compiler: Path) -> None:
    """Oracle: the folder afterwards: a young one may be another process's."""
    folder = compiled_library(NATIVE).parent
    for name, age_s in (("build-old", 100_000), ("build-young", 10)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    compiled_library(LEVELS[0])
    assert not (folder / "build-old").exists() and (folder / "build-young").exists()


def test_no_instruction_set_is_asked_for_that_no_level_covers() -> None:
    """Oracle: the macros in the C sources; one that is new needs a level, or a question at run time."""
    text = "".join(path.read_text() for path in FOLDER.glob("*.[ch]"))
    asked = set(re.findall(r"__(?:AVX|AMX|ARM|SSE|FMA|F16C|VAES|GFNI|x86|aarch)\w*", text))
    assert asked <= {
        *("__AVX2__", "__AVX512F__", "__AVX512BW__", "__AVX512BF16__", "__AVX512VBMI__", "__FMA__", "__F16C__"),
        *("__x86_64__", "__aarch64__"),
    }


def test_the_library_needs_torchs_openmp_and_nothing_else() -> None:
    """Oracle: its dynamic section: C's own libraries alone, so there is no second runtime; the runtime's functions are
    those of GOMP 4.5, which LLVM's and Intel's have, too; none of C's is newer than manylinux_2_28, torch's platform,
    on whatever system this was compiled."""
    if native_library() is None or shutil.which("readelf") is None:
        pytest.skip("there is no library, or no readelf")
    path = library._path_of(library._levels("1")[0])
    needed = run("readelf", "-d", str(path))
    assert set(re.findall(r"Shared library: \[([\w-]+)\.so", needed)) <= {"libc", "libm", "ld-linux-x86-64"}
    symbols = run("readelf", "--dyn-syms", "-W", str(path))
    assert {one for one in re.findall(r"UND (\w+@GLIBC_2\.\d+)", symbols) if int(one.rpartition(".")[2]) > 28} == set()
    names = set(re.findall(r"UND (GOMP_\w+|omp_\w+)", symbols))
    assert names <= {
        *("GOMP_barrier", "GOMP_parallel", "GOMP_single_start", "GOMP_loop_end", "GOMP_loop_end_nowait"),
        *(f"GOMP_loop_nonmonotonic_{kind}_{what}" for kind in ("dynamic", "guided") for what in ("start", "next")),
        *("omp_get_num_threads", "omp_get_thread_num"),
    }
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"/\S*lib(?:gomp|omp|iomp5)\S*", maps))) == 1


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.slow
def test_the_lowest_level_is_right(tmp_path: Path) -> None:
    """Oracle: the self-check, of vectors of another width than this processor's, in a process that has them alone."""
    level = best_level(processor_flags())
    if level is None or native_library() is None:
        pytest.skip("this processor has no level, or the kernels cannot be compiled")
    lowest = shippable_levels()[-1].name
    script = "from tp_engine.cpu import kernel_level; print(kernel_level())"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TP_ENGINE_NATIVE": lowest}, cwd=ROOT, check=True,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == f"{lowest}\n"
