"""The benchmark of speculation: a small run, which also compares all tokens."""

from __future__ import annotations

import json

import pytest
from bench_speculation import main


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the engine without speculation, whose tokens the benchmark compares; known answers and forced keys are
    guessed right."""
    assert main(["--shape", "C", "--dtype", "float32", "--rounds", "1", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["workloads"]
    assert list(found) == ["again", "random", "32 requests", "quote", "json"]
    assert found["again"]["accepted"] > 50 and found["json"]["accepted"] > 40
