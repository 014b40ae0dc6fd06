"""scripts/readme_figures: the order of its rounds, how it treats engines that fail or differ, and its table."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from figures import engines, measure, page, run
from figures.engines import Engine, Server, serving
from figures.measure import FIRST, PER_TOKEN, RATE, Cell

from tp_engine.apps.bench.workloads import BenchWorkload

SERVERS = [Server(name, "http://127.0.0.1:1", "m", 0) for name in ("tp_engine", "vLLM", "llama.cpp")]


def test_the_servers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; each round asks all, begins with another server and has prompts of its own."""
    asked: list[tuple[str, str, int]] = []

    def ask(server: Server, workload: BenchWorkload) -> Mapping[str, float]:
        asked.append((server.name, workload.name, workload.prompts[0][0]))
        return {PER_TOKEN: len(asked), FIRST: 1.0} if len(workload.prompts) == 1 else {RATE: 2.0}

    monkeypatch.setattr(measure, "_ask", ask)
    found = measure.rounds(SERVERS, 1000, 2, math.inf, {})
    counted = [name for name, workload, _ in asked[len(asked) // 3 :] if workload == "throughput"]
    assert counted == ["tp_engine", "vLLM", "llama.cpp", "vLLM", "llama.cpp", "tp_engine"]
    assert len(found) == 3 * 4 and all(len(values) == 2 for values in found.values())
    prompts = {first for name, workload, first in asked if (name, workload) == ("vLLM", "shared prefix")}
    assert len(prompts) == 3
    asked.clear()
    assert len(measure.rounds(SERVERS, 1000, 9, 0.0, {})[Cell("latency", FIRST, "vLLM")]) == 1


def test_a_server_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; the others' figures stay, and it is asked no more."""
    asked: list[str] = []

    def ask(server: Server, workload: BenchWorkload) -> Mapping[str, float]:
        asked.append(server.name)
        if server.name == "vLLM" and asked.count("vLLM") > 7:
            raise RuntimeError("latency: 3 tokens instead of 128")
        return {RATE: 2.0}

    monkeypatch.setattr(measure, "_ask", ask)
    failures: dict[str, str] = {}
    found = measure.rounds(SERVERS, 1000, 3, math.inf, failures)
    assert failures == {"vLLM": "latency: 3 tokens instead of 128"} and asked.count("vLLM") == 8
    assert {cell.engine for cell in found} == {"tp_engine", "llama.cpp"}


def test_answers_may_differ_at_a_near_tie_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; the gap is asked for after the tokens that both have."""
    told = {"tp_engine": [5, 6, 7], "vLLM": [5, 6, 7], "llama.cpp": [5, 9, 7]}
    monkeypatch.setattr(Server, "answer", lambda self, prompt, count: told[self.name])
    monkeypatch.setattr(measure, "_gap", lambda server, prompt, other: 0.25 if (prompt[-1], other) == (5, 9) else 99.0)
    equal, near = measure.compare_answers(SERVERS, 1000)
    assert equal == {"engine": "vLLM", "answers": 8, "equal": 8, "largest_gap": 0.0}
    assert near == {"engine": "llama.cpp", "answers": 8, "equal": 0, "largest_gap": 0.25}


def test_a_server_that_ends_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: what the program printed."""
    code = "print('no kernels for this processor'); raise SystemExit(3)"
    broken = Engine(
        command=lambda program, model, port: (program, "-c", code),
        environment=lambda program: {},
        version=lambda program: "1",
        answer=lambda client, prompt, count: [],
    )
    monkeypatch.setitem(engines.ENGINES, "SGLang", broken)
    with (
        pytest.raises(RuntimeError, match="its server ended with 3; it said last: no kernels for this processor"),
        serving("SGLang", sys.executable, tmp_path, tmp_path / "log"),
    ):
        pass


def report() -> dict[str, Any]:
    """A run of one model on two engines."""
    cells = {
        Cell("latency", PER_TOKEN, "tp_engine"): [8.0, 7.5, 9.25],
        Cell("latency", PER_TOKEN, "vLLM"): [16.0, 15.0, 17.0],
        Cell("throughput", RATE, "tp_engine"): [1500.4, 1400.0, 1600.0],
        Cell("throughput", RATE, "vLLM"): [1700.0, 1600.0, 1800.0],
    }
    return {
        "machine": "AMD EPYC(TM) Processor, 2 cores",
        "date": "2026-11-29",
        "versions": {"tp_engine": "0.3.0", "vLLM": "0.32.0"},
        "left_out": {"SGLang": "its kernels need AMX"},
        "models": [{"model": "B", "figures": [run.figure(cell, values) for cell, values in cells.items()]}],
    }


@pytest.mark.parametrize(
    ("flags", "arguments", "told"),
    [
        ({"avx512_bf16"}, [], {"SGLang": "No module named 'sgl_kernel'"}),
        ({"avx512_bf16"}, ["--left-out", "SGLang=no time"], {"SGLang": "no time"}),
        ({"avx512_bf16"}, ["--engine", "SGLang=python"], {}),
        ({"amx_bf16"}, [], {}),
    ],
)
def test_an_engine_that_the_machine_cannot_run_has_a_reason(
    flags: set[str], arguments: list[str], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what SGLang 0.5.23 said on such a machine; a peer that is given is tried."""
    monkeypatch.setattr(engines, "processor_flags", lambda: frozenset(flags))
    reasons = run.left_out(run.parse_arguments(["--models", "B", *arguments]))
    assert reasons.keys() == told.keys() and all(told[name] in reason for name, reason in reasons.items())


def test_the_documents_give_the_engines_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the file of figures, which a run on a machine without AMX wrote."""
    monkeypatch.setattr(engines, "processor_flags", lambda: frozenset[str]())
    figures = page.read_figures()
    assert figures is not None and figures["left_out"] == {"SGLang": engines.ENGINES["SGLang"].refusal()}


def test_the_table() -> None:
    """Oracle: by hand; the best of a row is bold, whichever direction is better."""
    text = page.updated(f"above\n{page.BEGIN}\nstale\n{page.END}\nbelow", report())
    assert "| | tp_engine | vLLM 0.32.0 |" in text and "stale" not in text and text.startswith("above\n")
    assert "ms per token | **8** (7.5-9.25) | 16 (15-17) |" in text
    assert "tokens/s | 1,500 (1,400-1,600) | **1,700** (1,600-1,800) |" in text
    assert "AMD EPYC, 2 cores, 2026-11-29" in text and "SGLang is left out: its kernels need AMX" in text
    assert page.updated(text, report()) == text
    assert page.updated(text, None) == f"above\n{page.BEGIN}\n{page.END}\nbelow"
    with pytest.raises(ValueError, match="between which the table belongs"):
        page.updated("no marks", report())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--engine", "vllm=python", "--models", "B"], "--engine names vllm; give NAME=... of vLLM, SGLang, llama.cpp"),
        (["--left-out", "SGLang", "--models", "B"], "--left-out names SGLang; give NAME=..."),
        (["--models", "B,Q"], "--models names Q; there are SmolLM2-135M, B"),
        ([], "give --smollm2"),
    ],
)
def test_wrong_use_is_told_with_a_remedy(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the names of engines and models."""
    with pytest.raises(SystemExit):
        run.parse_arguments(arguments)
    assert told in " ".join(capsys.readouterr().err.split())
