"""Traces of chosen steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.profiling import StepProfiler, names_for, parse_steps


def names_in(path: Path) -> list[str]:
    """Names of the events of a trace, in order of time."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if "name" in event]


def run_steps(profiler: StepProfiler, first: int, end: int) -> None:
    """Run steps with one part and one operation each."""
    named = profiler.named(None)
    for step_id in range(first, end):
        with profiler.step(step_id), named("model"):
            torch.ones(3).cumsum(0)


def test_the_chosen_steps_are_in_the_trace(tmp_path: Path) -> None:
    """Oracle: the names of the chosen steps; the operations of other steps are absent."""
    profiler = StepProfiler(tmp_path / "new" / "folder", range(3, 5), rank=1, device_type="cpu")
    run_steps(profiler, 1, 8)
    profiler.close()
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "rank1_steps3-4.json.gz"
    found = [name for name in names_in(path) if name in ("model", "aten::cumsum") or name.startswith("step ")]
    assert found == ["step 3", "model", "aten::cumsum", "step 4", "model", "aten::cumsum"]


def test_a_run_that_ends_early_leaves_what_it_has(tmp_path: Path) -> None:
    """Oracle: steps 2 and 3 of 2 to 9; closing twice writes once."""
    profiler = StepProfiler(tmp_path, range(2, 10), rank=0, device_type="cpu")
    run_steps(profiler, 1, 4)
    assert profiler.is_recording and not list(tmp_path.iterdir())
    profiler.close()
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0_steps2-3.json.gz"]


def test_steps_are_read() -> None:
    """Oracle: the range by hand; a wrong one gives an error with the remedy, also from the configuration."""
    assert parse_steps("10:20") == range(10, 20)
    for text in ("", "5", "5:", "0:3", "4:4", "7:3", "-1:3", "a:b", "1:2:3"):
        with pytest.raises(ConfigError, match=r"profile_steps is .*such as 10:20"):
            parse_steps(text)
    with pytest.raises(ConfigError, match="profile_steps is '3'"):
        resolve(EngineConfig(profile_steps="3"))


def test_names_cost_nothing_on_cpus() -> None:
    """Oracle: NVTX on CUDA; elsewhere there are none."""
    assert names_for("cuda") is torch.cuda.nvtx.range
    assert names_for("cpu") is None


def test_a_trace_on_demand(tmp_path: Path) -> None:
    """Oracle: the steps between the two orders; no trace without steps; a second order has no effect."""
    profiler = StepProfiler(tmp_path, parse_steps("none"), rank=0, device_type="cpu")
    run_steps(profiler, 1, 3)
    profiler.stop()
    profiler.start()
    profiler.stop()
    assert not list(tmp_path.iterdir())
    profiler.start()
    profiler.start()
    run_steps(profiler, 3, 6)
    profiler.stop()
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0_steps3-5.json.gz"]
