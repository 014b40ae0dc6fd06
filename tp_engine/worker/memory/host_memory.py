"""Memory of this host and of this process, from /proc and the cgroup file system.  Linux only, no dependency."""

from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 where there is no limit
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes that all processes of this host, or of this container, share."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Resident bytes of this process now, and their peak since the last reset."""

    resident: int
    peak: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the machine's memory, or the tightest cgroup limit above this process.

    Page cache that the kernel would reclaim counts as free.  ``root`` is where /proc and /sys are mounted.
    """
    fields = _fields(root / "proc/meminfo")
    total, free = fields["MemTotal"] * _KIB, fields["MemAvailable"] * _KIB
    for limit, used in _cgroup_limits(root):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return HostMemory(total=total, free=free)


def process_memory(root: Path = Path("/")) -> ProcessMemory:
    """Return this process's resident memory (VmRSS) and its high-water mark (VmHWM)."""
    fields = _fields(root / "proc/self/status")
    resident = fields["VmRSS"] * _KIB
    return ProcessMemory(resident=resident, peak=max(resident, fields["VmHWM"] * _KIB))


def reset_peak(root: Path = Path("/")) -> None:
    """Reset the high-water mark; if the kernel forbids it, peaks remain those since the process began."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _fields(path: Path) -> dict[str, int]:
    """``Name:  123 kB`` lines as numbers; other lines are left out."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            found[name] = int(value[0])
    return found


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every memory cgroup from this process's up to the root."""
    limits: list[tuple[int, int]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            limits += _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _walk(root / "sys/fs/cgroup/memory", path, *names)
    return limits


def _walk(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[tuple[int, int]]:
    """Limits from ``path`` upwards; in a container, ``path`` may be the host's and only the mount itself exist."""
    found = []
    folder = mount / path.lstrip("/")
    for place in (folder, *folder.parents):
        try:
            limit = int((place / limit_name).read_text())
            used = int((place / usage_name).read_text())
        except (OSError, ValueError):  # no such file, or the word "max"
            limit, used = _NO_LIMIT, 0
        if limit < _NO_LIMIT:
            found.append((limit, max(used - _reclaimable(place, cache_name), 0)))
        if place == mount:
            break
    return found


def _reclaimable(place: Path, cache_name: str) -> int:
    """Page cache of the cgroup that the kernel would reclaim first."""
    try:
        rows = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        return next((int(value) for name, value in rows if name == cache_name), 0)
    except (OSError, ValueError):
        return 0
