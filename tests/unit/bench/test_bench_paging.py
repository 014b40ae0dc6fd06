"""The paging benchmark: its shares of the pool, which are exact, and a small run of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_paging import main, parse_arguments
from benchmarks.paging.memory import TRACES, Trace, compare_memory, occupancy
from benchmarks.paging.throughput import requests_at_once
from benchmarks.shapes import qwen3_config


def test_a_contiguous_pool_by_hand() -> None:
    """Oracle: worked out: 2 reservations of 8 tokens, 16 requests of 4 tokens in and 4 out, always two at a time.

    After the steps of a request 4, 5, 6 and 0 tokens are in the pool: the fourth step ends the request.  From the first
    end, step 4, to the last step with a request waiting, step 28, that is 6 whole turns and a seventh 0.
    """
    trace = Trace(name="t", max_len=8, num_reservations=2, prompt=(4, 4), total=8, documented=(0, 0))
    found = occupancy(trace, trace.max_len)
    assert found.num_steps == 8 * 4, "16 requests, two at a time, 4 steps each"
    assert found.share == pytest.approx(6 * 2 * (4 + 5 + 6) / 25 / 16)


def test_shares_of_the_pool_reach_the_goal() -> None:
    """Oracle: the documented shares, 95, 92, 89 and 94 % with blocks; reservations are far below in every trace."""
    rows = compare_memory(16)
    assert [row["goal"] for row in rows] == [0.95, 0.92, 0.89, 0.94] and all(row["met"] for row in rows), rows
    assert all(row["contiguous"] < row["paged"] - 0.2 for row in rows)  # type: ignore[operator]
    assert all(row["running_contiguous"] <= trace.num_reservations for row, trace in zip(rows, TRACES, strict=True))  # type: ignore[operator]


def test_requests_are_alike_for_every_seed() -> None:
    """Oracle: the definition: lengths depend on the number of requests only, ids on the seed."""
    first, second = requests_at_once(300, 0, 4), requests_at_once(300, 1, 4)
    assert list(map(len, first.prompts)) == list(map(len, second.prompts)) and first.prompts != second.prompts
    assert all(64 <= len(prompt) <= 256 for prompt in first.prompts)
    assert all(64 <= count <= 192 for count in first.max_tokens)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: fp32 tokens without a cache are those with one; one JSON line, and a picture with three panels."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    arguments = ["--model", str(tmp_path), "--rounds", "1", "--requests", "1,4", "--shrink", "16"]
    arguments += ["--max-model-len", "64", "--reservations", "2", "--tokens", "12", "--stride", "3"]
    arguments += ["--engine-options", '{"load_format": "dummy"}', "--plot", str(tmp_path / "paging.svg")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert len(report["memory"]) == 4 and "12 tokens:" in printed
    assert [row["requests"] for row in report["throughput"]] == [1, 4]
    assert all(row["ratio"] > 0 and row["goal"] in (0.94, 1.18) for row in report["throughput"])
    cache = report["kv_cache"]
    assert [point[0] for point in cache["points"]] == [1, 4, 7, 10] and cache["equal_tokens"] == 1.0
    picture = ElementTree.parse(tmp_path / "paging.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == 3


def test_the_command_line_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: an error with the value and the rule."""
    for wrong in (["--sections", "memory,speed"], ["--stride", "0"], ["--max-model-len", "100"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)
    told = capsys.readouterr().err
    assert "speed; choose among memory, throughput, cache" in told
    assert "--stride is 0; it must be at least 1" in told and "multiple of --block-size" in told
