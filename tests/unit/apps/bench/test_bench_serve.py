"""The serving benchmark's arithmetic, traffic and figures; and what its client makes of wrong answers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tp_engine.api.server_client import ServerError
from tp_engine.apps.bench.serving import client
from tp_engine.apps.bench.serving.client import Target, TimedAnswer, ask, first_model
from tp_engine.apps.bench.serving.metrics import details, summarise
from tp_engine.apps.bench.serving.options import parse_arguments
from tp_engine.apps.bench.serving.traffic import Request, arrival_times, file_requests, random_requests

# What ``vllm bench serve --save-result`` writes about a run of text generation.
VLLM_FIELDS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def answer(start: float, ttft: float, *gaps: float) -> TimedAnswer:
    """A successful request."""
    return TimedAnswer(
        prompt_len=10,
        start_time=start,
        ttft=ttft,
        itl=list(gaps),
        latency=ttft + sum(gaps),
        output_tokens=len(gaps) + 1,
        success=True,
    )


def test_figures() -> None:
    """Oracle: worked out by hand, and the field names of vLLM; zeros if all requests failed."""
    failed = TimedAnswer(prompt_len=10, error="HTTP 429")
    answers = [answer(5.0, 0.1, 0.2, 0.2), answer(5.5, 0.3, 0.4), answer(6.2, 0.2), failed]
    figures = summarise(answers, 2.0, [50.0, 99.0], {"ttft": 250.0, "tpot": 300.0})
    assert figures.keys() == VLLM_FIELDS | {f"p50_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")}
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.5, 3.0)
    assert figures["request_goodput"] == 1.0  # the second is late, and slow
    assert figures["mean_ttft_ms"] == pytest.approx(200.0) and figures["median_e2el_ms"] == pytest.approx(500.0)
    assert figures["mean_tpot_ms"] == pytest.approx(300.0)  # the third has no second token
    assert figures["p99_itl_ms"] == pytest.approx(np.percentile([200, 200, 400], 99))
    assert (figures["max_output_tokens_per_s"], figures["max_concurrent_requests"]) == (4.0, 2)
    assert details(answers)["output_lens"] == [3, 2, 1, 0]
    none = summarise([failed], 1.0, [99.0], {})
    assert none["request_goodput"] is None and none["failed"] == 1 and none["mean_ttft_ms"] == 0.0


@pytest.mark.parametrize(("burstiness", "expected"), [(1.0, 1.0), (0.25, 2.0)])
def test_arrivals_follow_a_gamma_distribution(burstiness: float, expected: float) -> None:
    """Oracle: the gaps' coefficient of variation is 1 / sqrt(burstiness); the last comes after n / rate seconds."""
    times = arrival_times(20_000, 50.0, burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(400.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.1)
    assert arrival_times(3, math.inf, burstiness, 0) == [0.0] * 3


def test_prompts(tmp_path: Path) -> None:
    """Oracle: random: lengths within the ratio, ids below the vocabulary, a shared prefix; of a file: its lines."""
    sizes: dict[str, Any] = {"input_len": 100, "output_len": 50, "range_ratio": 0.2, "prefix_len": 7, "vocab_size": 300}
    requests = random_requests(500, 0, **sizes)
    lengths = [len(request.prompt) - 7 for request in requests]
    assert (min(lengths), max(lengths)) == (80, 120)
    assert {request.max_tokens for request in requests} == set(range(40, 61))
    assert max(max(request.prompt) for request in requests) < 300  # type: ignore[operator]
    assert len({tuple(request.prompt[:7]) for request in requests}) == 1
    assert requests != random_requests(500, 1, **sizes) and requests == random_requests(500, 0, **sizes)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": [1, 2]}\n')
    found = [(request.prompt, request.max_tokens) for request in file_requests(path, 3, 9)]
    assert found == [("a", 3), ([1, 2], 9), ("a", 3)]
    path.write_text("[]\n")
    with pytest.raises(SystemExit, match=r"prompts\.jsonl"):
        file_requests(path, 1, 1)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the documented options; the error for a wrong value states the rule."""
    args = parse_arguments("", ["--request-rate", "1,2.5,inf", "--goodput", "ttft:500", "tpot:50"])
    assert args.request_rate == [1.0, 2.5, math.inf] and args.goodput == {"ttft": 500.0, "tpot": 50.0}
    for arguments in (["--request-rate", "0"], ["--goodput", "itl:5"], ["--base-url", "x", "--shape", "qwen3-8b"]):
        with pytest.raises(SystemExit):
            parse_arguments("", arguments)
    told = capsys.readouterr().err
    assert "rates must be positive" in told and "such as ttft:500" in told and "leave --base-url out" in told


OK, ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65_536
WRONG_ANSWERS = {
    "no HTTP": b"hello\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "long head": b"HTTP/1.1 200 OK\r\n" + ENDLESS * 2,
    "size in letters": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    "huge chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffff\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
    "HTML": OK + b"<html>log in</html>",
    "line without end": OK + b"data: " + ENDLESS * 40,
    "stream without end": OK + b": a comment\n" * 200_000,
    "deep": OK + b"data: " + b"[" * 60_000 + b"\n",
    **{
        text: OK + b"data: " + text.encode() + b"\n\n"
        for text in ("no JSON", "[1]", '{"choices": 1}', '{"choices": [1]}', '{"choices": [{"delta": []}]}',
                     '{"usage": {"prompt_tokens": "1"}, "choices": []}', '{"error": {"message": "no"}}')
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_answer_is_a_failure_of_its_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: one line about each, no exception; and what is read has a limit."""
    for limit in ("MOST_BYTES", "MOST_LINE_BYTES", "MOST_STREAM_BYTES"):
        monkeypatch.setattr(client, limit, 1 << 20)

    async def served() -> TimedAnswer:
        async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(WRONG_ANSWERS[name])
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target = Target(base_url=f"http://127.0.0.1:{port}", endpoint="/v1/completions", model="m", timeout_s=60)
            with pytest.raises(ServerError, match="/v1/models cannot be read"):
                await first_model(target)
            return await ask(target, Request(prompt=[1, 2], max_tokens=2))

    answer = asyncio.run(served())
    assert not answer.success and answer.error
