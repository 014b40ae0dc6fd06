"""The device's clocks beside the times of its kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_engine.worker import device
from tp_engine.worker.tuning import timing
from tp_engine.worker.tuning.report import as_report
from tp_engine.worker.tuning.table import RIGHT, Tried, TunedShape, TunedTable
from tp_engine.worker.tuning.timing import clocks_of


class Driver:
    """The driver's library, of one GPU without a clock of its memory."""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:  # its name
        return 0 if name == b"GPU-12ab" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, rate: Any) -> int:
        rate._obj.value = 1980
        return 0 if kind == 1 else 3


def test_clocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the driver's library says; nothing is said of what it does not know, or without it."""
    gpu = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(device, "_library", Driver)
    assert clocks_of(torch.device("cuda", 0)) == "units 1980 MHz"
    gpu.uuid = "another"
    assert clocks_of(torch.device("cuda", 0)) == ""
    monkeypatch.setattr(device, "_library", lambda: None)
    assert clocks_of(torch.device("cuda", 0)) == ""


def test_clocks_of_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the mean, by hand; many processors tell none."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(timing, "_PROCESSORS", file)
    assert clocks_of(torch.device("cpu")) == ""
    file.write_text("model name: x\ncpu MHz\t\t: 2000.0\n\ncpu MHz\t\t: 3000.0\n")
    assert clocks_of(torch.device("cpu")) == "cores 2500 MHz"


def test_the_report_has_them() -> None:
    """Oracle: the words of the shape."""
    one = TunedShape(
        operation="x",
        shape={"in": 1},
        extent="quick",
        choice=((1, "a"),),
        default=((1, "a"),),
        tried=(Tried(candidate="a", verdict=RIGHT),),
        clocks="units 1980 MHz before, units 1410 MHz after",
    )
    assert "  clocks: units 1980 MHz before, units 1410 MHz after\n" in as_report(TunedTable(device={}, shapes=(one,)))
