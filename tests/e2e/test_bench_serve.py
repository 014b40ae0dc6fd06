"""The serving benchmark against the real HTTP server in front of an engine without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.figures import figures_of

from tests.e2e.frontend import RunningServer, new_engine, running_server
from tests.e2e.serving import ROOT
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

DEADLINE_S = 340.0


def bench(*arguments: str) -> tuple[int, str, dict]:  # type: ignore[type-arg]
    """Exit code, everything printed, and the last line's JSON."""
    command = [
        sys.executable,
        "-m",
        "tp_engine",
        "bench",
        "serve",
        "--num-warmups",
        "1",
        "--vocab-size",
        "250",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


def measured(server: RunningServer, *arguments: str) -> tuple[int, str, dict]:  # type: ignore[type-arg]
    return bench("--base-url", server.url, *arguments)


def test_a_sweep_counts_every_token(tmp_path: Path) -> None:
    """Oracle: the fake engine repeats each prompt, so tokens in and out are equal and known; vLLM's field names."""
    with running_server(new_engine(step_delay_s=0.002)) as server:
        code, printed, report = measured(
            server, "--request-rate", "40,inf", "--num-prompts", "12", "--input-len", "9", "--output-len", "9",
            "--goodput", "ttft:60000", "tpot:60000", "--result-dir", str(tmp_path), "--save-detailed",
            "--extra-body", '{"return_token_ids": true}',
        )  # fmt: skip
        assert len(server.engine.added) == 1 + 2 * 12
        prompts = {tuple(request.prompt_token_ids) for request in server.engine.added}
        assert len(prompts) == 25, "a prompt was used twice"
    assert code == 0, printed
    for result, rate in zip(report["results"], (40.0, "inf"), strict=True):
        assert result["request_rate"] == rate and result["model_id"] == "demo" and result["backend"] == "openai"
        assert (result["completed"], result["failed"]) == (12, 0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 9, 12 * 9)
        assert result["request_goodput"] == pytest.approx(result["request_throughput"])
        assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"] and result["median_itl_ms"] > 0
        saved = json.loads((tmp_path / f"rate-{rate}.json").read_text())
        assert saved["output_lens"] == [9] * 12 and all(len(gaps) == 8 for gaps in saved["itls"])
    assert report["results"][0]["duration"] >= 12 / 40.0 * 0.9
    assert len(figures_of(report)) == 2 * 3, "gpu_check shows three figures of each rate"


def test_chat_with_prompts_of_a_file(tmp_path: Path) -> None:
    """Oracle: the file's number of tokens; the key reaches the server, which refuses all without it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 5}\n{"prompt": "a longer one", "output_tokens": 8}\n')
    with running_server(new_engine(), ServerConfig(port=0, api_key=("secret",))) as server:
        code, printed, report = measured(
            server, "--endpoint", "/v1/chat/completions", "--dataset-path", str(path), "--num-prompts", "4",
            "--max-concurrency", "1", "--api-key", "secret",
        )  # fmt: skip
    assert code == 0, printed
    (result,) = report["results"]
    assert result["backend"] == "openai-chat" and result["max_concurrency"] == 1
    assert result["completed"] == 4 and result["total_output_tokens"] == 2 * (5 + 8)
    with running_server(new_engine(), ServerConfig(port=0, api_key=("secret",))) as server:
        code, printed, report = measured(server, "--model", "demo", "--num-prompts", "3")
    assert code == 1 and report["results"][0]["failed"] == 3 and "HTTP 401" in printed


@pytest.mark.parametrize("server", [("--server-args", "--device cpu --num-gpu-blocks-override 64"), ("--fake-engine",)])
def test_it_starts_and_stops_a_server_of_its_own(tmp_path: Path, server: tuple[str, ...]) -> None:
    """Oracle: the demo model's server on CPUs, and the one that computes nothing, answer all requests; the fixtures
    check for leaks."""
    code, printed, report = bench(
        "--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--result-dir", str(tmp_path), *server
    )
    assert code == 0, printed + (tmp_path / "server.log").read_text()
    assert report["started"] and report["results"][0]["total_output_tokens"] == 3 * 4


def test_a_gate_finds_a_slower_engine(tmp_path: Path) -> None:
    """Oracle: an engine whose steps take longer by design: 0 beside itself with a wide tolerance, 1 when it is slower;
    2, at once, for another load."""
    baseline, junit = str(tmp_path / "baseline.json"), str(tmp_path / "junit.xml")
    load = ("--num-prompts", "4", "--input-len", "8", "--output-len", "8", "--repeats", "3")
    with running_server(new_engine(step_delay_s=0.03)) as server:
        assert measured(server, *load, "--record", baseline)[0] == 0
        code, printed, _ = measured(server, *load, "--against", baseline, "--tolerance", "95%")
        assert code == 0, printed
        code, printed, report = measured(server, *load, "--input-len", "9", "--against", baseline)
        assert code == 2 and "input_len is 9, and was 8" in printed and not report["figures"]
    with running_server(new_engine(step_delay_s=0.4)) as server:
        code, printed, report = measured(server, *load, "--against", baseline, "--tolerance", "30%", "--junit", junit)
    assert code == 1, printed
    verdicts = {line["name"]: line["verdict"] for line in report["lines"]}
    assert verdicts["rate inf, output_throughput"] == verdicts["rate inf, median_tpot_ms"] == "failed"
    assert "<failure" in Path(junit).read_text(encoding="utf-8")
