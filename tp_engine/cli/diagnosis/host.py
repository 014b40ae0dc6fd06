"""The host: shared memory, limits, memory allocation, folders, the kernel."""

from __future__ import annotations

import ctypes.util
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tp_engine import env
from tp_engine.cli.diagnosis.finding import Finding, Status
from tp_engine.ipc.segment import SHM_FOLDER
from tp_engine.units import GIB, MIB, format_gib
from tp_engine.worker.host_memory import host_memory

LEAST_SHM = 16 * MIB
LEAST_FILES = 4096
_MALLOCS = ("tcmalloc", "jemalloc", "mimalloc")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "sve", "bf16")


def check_host(*, on_cpu: bool) -> Iterator[Finding]:
    """Everything but the devices; ``on_cpu``: the model would run on this host's processor."""
    yield _processor()
    memory = host_memory()
    yield Finding(
        topic="memory", status=Status.OK, detail=f"{format_gib(memory.total)}, {format_gib(memory.free)} free"
    )
    yield shared_memory(SHM_FOLDER)
    yield open_files()
    yield process_handles()
    yield writable("cache folder", env.cache_dir(), "set TP_ENGINE_CACHE_DIR to a folder that can be written to")
    yield writable("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a folder that can be written to")
    yield allocator(_loaded_libraries(), on_cpu=on_cpu)
    if on_cpu:
        yield huge_pages(_HUGE_PAGES)


def _processor() -> Finding:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [name for name in _CPU_FLAGS if name in flags]
    name = fields.get("model name") or platform.machine()
    cores = len(os.sched_getaffinity(0))
    return Finding(
        topic="processor", status=Status.OK, detail=f"{name}, {cores} cores, {' '.join(features) or 'no vector units'}"
    )


def shared_memory(folder: Path) -> Finding:
    """Room for the ranks' plans."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding(
            topic="shared memory",
            status=Status.MISSING,
            detail=f"{folder}: {error.strerror}",
            remedy=f"mount a tmpfs of at least {LEAST_SHM // MIB} MiB at {folder}",
        )
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    detail = f"{folder}: {size / GIB:.2f} GiB, {free / GIB:.2f} GiB free"
    if free >= LEAST_SHM:
        return Finding(topic="shared memory", status=Status.OK, detail=detail)
    remedy = f"at least {LEAST_SHM // MIB} MiB are needed: docker run --shm-size=64m, or free some"
    return Finding(topic="shared memory", status=Status.MISSING, detail=detail, remedy=remedy)


def open_files() -> Finding:
    """Every stream is a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding(topic="open files", status=Status.OK, detail=f"limit {soft} (hard {hard})")
    return Finding(
        topic="open files",
        status=Status.NOTE,
        detail=f"limit {soft}: a server holds one per connection",
        remedy=f"ulimit -n {LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}",
    )


def process_handles() -> Finding:
    """Watchdogs wait for processes through pidfds (Linux 5.3)."""
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding(
            topic="kernel",
            status=Status.MISSING,
            detail=f"{platform.system()} {release} has no pidfd_open ({error})",
            remedy="use Linux 5.3 or newer; in a container, allow the system call pidfd_open",
        )
    return Finding(topic="kernel", status=Status.OK, detail=f"{platform.system()} {release}")


def writable(topic: str, folder: Path, remedy: str) -> Finding:
    """Whether files can be made in a folder, or in the nearest folder above that exists."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if os.access(place, os.W_OK | os.X_OK):
        return Finding(topic=topic, status=Status.OK, detail=str(folder))
    return Finding(topic=topic, status=Status.NOTE, detail=f"{folder} can not be written to", remedy=remedy)


def allocator(libraries: str, *, on_cpu: bool) -> Finding:
    """Which malloc this process has; glibc's may give memory back and take it again in every step of a CPU model."""
    loaded = [name for name in _MALLOCS if name in libraries]
    if loaded or not on_cpu:
        detail = f"{loaded[0]} is loaded" if loaded else "glibc (it hardly matters where a GPU computes)"
        return Finding(topic="malloc", status=Status.OK, detail=detail)
    found = [file for name in ("tcmalloc_minimal", "jemalloc") if (file := ctypes.util.find_library(name))]
    remedy = f"LD_PRELOAD={found[0]} tp-engine ..." if found else "install libtcmalloc-minimal4 and LD_PRELOAD it"
    return Finding(topic="malloc", status=Status.NOTE, detail="glibc; on CPUs tcmalloc may be faster", remedy=remedy)


def huge_pages(setting: Path) -> Finding:
    """Whether those who ask get pages of 2 MiB; ``setting`` holds a line such as "always [madvise] never"."""
    try:
        words = setting.read_text(encoding="utf-8").split()
    except OSError:
        words = []
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "missing")
    if chosen in ("always", "madvise"):
        return Finding(topic="huge pages", status=Status.OK, detail=chosen)
    detail = f"{chosen}: weights and KV cache are read more slowly"
    return Finding(topic="huge pages", status=Status.NOTE, detail=detail, remedy=f"echo madvise > {setting}")


def _loaded_libraries() -> str:
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
