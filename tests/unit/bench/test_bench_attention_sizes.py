"""The sweep of the attention kernels' sizes: its table, and its message without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_engine.kernels.ops import has_triton

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_attention_sizes")


def test_report(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the current sizes first, then the fastest; failures are counted, not hidden."""
    rows = [
        {"kernel": "k", "sizes": "a", "is_current": True, "us": 3.0, "share": 0.3},
        {"kernel": "k", "sizes": "b", "is_current": False, "us": 2.0, "share": 0.5},
        {"kernel": "k", "sizes": "c", "is_current": False, "error": "no room"},
    ]
    kept = bench.report("decode", iter(rows), 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode: 2 of 3 candidates ran"
    assert "current" in lines[1] and lines[1].endswith("a") and lines[2].split() == ["2.0", "us", "50.0%", "b"]
    assert [row["case"] for row in kept] == ["decode"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit status 2, and the reason."""
    assert bench.main([]) == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available() or not has_triton(), reason="for Triton without a GPU")
def test_candidates_can_be_made(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: every candidate has a row, current sizes first; the kernels and the clock are replaced."""
    from tp_engine.kernels.attention import paged_decode_triton, paged_prefill_triton

    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties)
    monkeypatch.setattr(bench, "seconds_per_launch", lambda launches, repeats: [one() for one in launches] and 1e-6)
    for module, name in ((paged_decode_triton, "paged_decode_triton"), (paged_prefill_triton, "paged_prefill_triton")):
        monkeypatch.setattr(module, name, lambda *tensors, sizes, **rest: calls.append(sizes))
    for name in ("randperm", "full", "randn", "arange"):
        monkeypatch.setattr(torch, name, _on_cpu(getattr(torch, name)))
    shape = bench.Shape(name="tiny", hidden=8, inner=10, num_heads=2, num_kv_heads=1, head_dim=4, device="cpu")
    decodes = list(bench.decode_rows(shape, 2, 40, torch.int8, 1e12))
    prefills = list(bench.prefill_rows(shape, 2, 40, torch.bfloat16, 1e12))
    for rows in (decodes, prefills):
        assert [row["is_current"] for row in rows] == [True] + [False] * (len(rows) - 1)
        assert all("us" in row for row in rows) and len({row["sizes"] for row in rows}) == len(rows)
    assert len(set(map(str, calls))) == len(decodes) + len(prefills)


class _Properties:
    multi_processor_count, L2_cache_size = 132, 1


def _on_cpu(make: Any) -> Any:
    return lambda *args, **kwargs: make(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
