"""Processors of containers: quotas of both versions of cgroups, affinity, threads of ranks, and what doctor shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tp_engine.apps.doctor.machine import processor
from tp_engine.system import cpus


def system(root: Path, lines: str, files: dict[str, str]) -> Path:
    """/proc and /sys of a process in the cgroups that ``lines`` name."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = {"cpu/kube/pod/cpu.cfs_quota_us": "400000", "cpu/kube/pod/cpu.cfs_period_us": "100000"}
CASES = {
    "no cgroups": ("", {}, None),
    "version 2": ("0::/kube/pod\n", {"kube/pod/cpu.max": "150000 100000"}, 1.5),
    "version 2, no quota": ("0::/pod\n", {"pod/cpu.max": "max 100000"}, None),
    "version 2, tighter above": ("0::/a/b\n", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "200000 100000"}, 2.0),
    "version 2, the root of a container": ("0::/\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 2, a path of the host": ("0::/kubepods/x\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 1": ("4:cpu,cpuacct:/kube/pod\n3:memory:/\n", V1, 4.0),
    "version 1, no quota": ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "version 1, mounted by its whole name": (
        "4:cpu,cpuacct:/\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        0.5,
    ),
    "not readable": ("0::/\n", {"cpu.max": "nonsense"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: quota by period, by hand; whole processors of it, at least one, and no more than are visible."""
    lines, files, expected = CASES[case]
    root = system(tmp_path, lines, files)
    assert cpus.cpu_quota(root) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    assert cpus.num_cpus(root) == (3 if expected is None else max(1, min(3, int(expected))))


@pytest.mark.parametrize(
    ("asked", "torchrun", "num_local", "expected"),
    [("", False, 1, 8), ("", False, 2, 4), ("", False, 32, 1), ("6", False, 2, 6), ("1", False, 2, 1),
     ("1", True, 2, 4), ("6,2", True, 2, 6), ("many", False, 2, 4)],
)  # fmt: skip
def test_threads_of_ranks(
    asked: str, torchrun: bool, num_local: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand, for 8 processors and 16 threads that torch would use; a variable that is set is obeyed, but for
    torchrun's own 1."""
    monkeypatch.setattr(cpus, "num_cpus", lambda root: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert cpus.threads_of_rank(16, num_local) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert cpus.threads_of_rank(3, 1) == 3


@pytest.mark.parametrize(
    ("quota", "asked", "num_ranks", "expected"),
    [
        ("max 100000", "", 1, "12 cores, 12 threads for each rank, avx2"),
        ("max 100000", "", 4, "12 cores, 3 threads for each rank, avx2"),
        ("450000 100000", "", 1, "12 cores of which a quota allows 4.5, 4 threads for each rank, avx2"),
        ("450000 100000", "", 4, "12 cores of which a quota allows 4.5, 1 thread for each rank, avx2"),
        ("450000 100000", "7", 4, "12 cores of which a quota allows 4.5, 7 threads for each rank, avx2"),
    ],
)
def test_doctor_shows_affinity_quota_and_threads(
    quota: str, asked: str, num_ranks: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand, for 12 visible processors, and 32 threads that torch would use."""
    root = system(tmp_path, "0::/pod\n", {"pod/cpu.max": quota})
    (root / "proc/cpuinfo").write_text("model name : Maker 9\nflags : fpu avx2\n\nmodel name : Other\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert processor(num_ranks, root).detail == f"Maker 9, {expected}"
