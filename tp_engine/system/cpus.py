"""How many processors this process may use: those of its affinity, and of its container's quota.

A quota (``docker --cpus 4``, ``limits.cpu`` of Kubernetes) leaves all cores visible, and stops all threads for the rest
of each period once they have used up its time together: more threads than that make everything slower.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tp_engine.system import env


def num_cpus(root: Path = Path("/")) -> int:
    """Return the number of processors that all threads of this process together may keep busy, at least 1.  ``root`` is
    where /proc and /sys are mounted."""
    visible, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return visible if quota is None else max(1, min(visible, math.floor(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the tightest quota of the cgroups above this process, in processors; None if there is none."""
    found = list(_quotas(root))
    return min(found) if found else None


def threads_of_rank(default: int, num_local_ranks: int, root: Path = Path("/")) -> int:
    """Return how many threads one of ``num_local_ranks`` ranks of this host computes with.

    ``OMP_NUM_THREADS`` is obeyed, except for the 1 that torchrun sets where nobody has set it.  Otherwise it is the
    rank's share of ``num_cpus``; a single rank has ``default``, what torch would use, if the quota allows it.
    """
    asked = env.OMP_NUM_THREADS.read().partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0 and not (asked == "1" and env.has_torchrun_agent()):
        return int(asked)
    share = max(1, num_cpus(root) // num_local_ranks)
    return min(default, share) if num_local_ranks == 1 else share


def _quotas(root: Path) -> Iterator[float]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            for folder in _up(root / "sys/fs/cgroup", path):
                yield from _ratio(_words(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in {"cpu", controllers}:
                for folder in _up(root / "sys/fs/cgroup" / mount, path):
                    yield from _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _up(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and those above it; a container may see only the mount's root."""
    for one in (PurePosixPath(path), *PurePosixPath(path).parents):
        yield mount / str(one).lstrip("/")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(words: list[str]) -> Iterator[float]:
    """Quota by period; nothing where there is no quota (``max``, -1)."""
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])
