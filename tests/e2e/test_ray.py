"""A real local Ray cluster: Ray Data and Ray Serve with two replicas of the demo model, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

pytestmark = pytest.mark.slow

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra: ray); run scripts/test_ray")
def test_replicas_under_ray() -> None:
    """Oracle: sums by hand; the requests that were in flight on the killed replica are the only ones that are lost."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # a short path
        log = Path(folder, "log")
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-m", "tests.e2e.ray_cluster", folder],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=540,
            )  # fmt: skip
        assert done.returncode == 0, log.read_text()[-8000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    assert seen["offline"] == [str(2 * number) for number in range(12)]
    assert seen["over_http"] == sorted(str(2 * number) for number in (2, 4, 6, 8))
    assert seen["models"] == ["demo"]
    kill = seen["kill"]
    assert kill["by_replica"] == 3, "the killed replica, the other one and the new one have answered"
    assert kill["lost"], "a request was in flight on the killed replica"
    assert all(lost["on_victim"] and lost["after_kill_s"] < 0 for lost in kill["lost"]), kill["lost"]
