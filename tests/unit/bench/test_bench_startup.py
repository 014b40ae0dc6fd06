"""The start-up benchmark's arithmetic and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_startup import parse_arguments, run_rounds, summarise
from benchmarks.startup.starts import Start, _announced, _differences


def start(first_token_s: float, **within: float) -> Start:
    phases = {"interpreter": 0.5, "ready": first_token_s - 0.5}
    return Start(ready_s=first_token_s - 0.5, first_token_s=first_token_s, cpu_s=1.0, phases=phases, within=within)


def test_phases_follow_one_another() -> None:
    """Oracle: the differences, by hand; they sum to the whole."""
    phases = _differences({"interpreter": 0.5, "imports": 2.0, "ready": 2.25})
    assert phases == {"interpreter": 0.5, "imports": 1.5, "ready": 0.25}


def test_medians_and_the_ratio() -> None:
    """Oracle: by hand: the median of three; vLLM's 12 s over our 3 s; a phase that is missing in one round."""
    ours = [start(3.0, weights=1.0), start(9.0, weights=2.0), start(1.0)]
    own, peer = summarise({"tp_engine LLM TP 1": ours, "vllm 1": [start(12.0)], "failed": []})
    assert own["first_token_s"] == 3.0 and own["ratio"] == 4.0 and own["within"] == {"weights": 1.5}
    assert peer["ratio"] == 1.0


def test_the_first_round_does_not_count_and_a_failure_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the calls: one more than the rounds; a contender that fails is not started again."""
    calls: list[str] = []

    def good() -> Start:
        calls.append("good")
        return start(float(len(calls)))

    def bad() -> Start:
        calls.append("bad")
        raise RuntimeError("no memory")

    starts, failures = run_rounds({"good": good, "bad": bad}, 2)
    assert calls == ["good", "bad", "good", "good"] and [one.first_token_s for one in starts["good"]] == [3.0, 4.0]
    assert failures == {"bad": "no memory"} and starts["bad"] == []
    assert "bad failed: no memory" in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the requested cells and sizes; the words of the errors."""
    args = parse_arguments(["--cells", "A:bfloat16,C:float32", "--tensor-parallel-size", "1,2"])
    assert args.cells == [("A", "bfloat16"), ("C", "float32")] and args.sizes == [1, 2]
    for wrong, words in (("--contenders=http", "llm and server"), ("--rounds=0", "must count")):
        with pytest.raises(SystemExit):
            parse_arguments([wrong])
        assert words in capsys.readouterr().err


def test_the_servers_announcement(tmp_path: Path) -> None:
    """Oracle: the URL in the line that the server prints; None before that line."""
    log = tmp_path / "log"
    log.write_text("INFO loading weights took 0.1 s\n")
    assert _announced(log) is None
    log.write_text("serving C at http://127.0.0.1:80, try:\n  curl")
    assert _announced(log) == "http://127.0.0.1:80"
