"""Figures from answers, with the field names of ``vllm bench serve``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tp_engine.apps.bench.serving.client import TimedAnswer

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def summarise(
    answers: Sequence[TimedAnswer], duration_s: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Counts, rates per second, and mean, median, standard deviation and percentiles of each latency in milliseconds.
    ``goodput`` are limits in milliseconds for ``GOODPUT_NAMES``; a request is good if it meets all of them."""
    done = [answer for answer in answers if answer.success]
    num_input, num_output = sum(answer.prompt_len for answer in done), sum(answer.output_tokens for answer in done)
    peak_tokens, peak_requests = _peaks(done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(_is_good(answer, goodput) for answer in done) / duration_s if goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for name, values in _latencies(done).items():
        figures |= _statistics(name, values, percentiles)
    return figures


def details(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """The figures of each request, in seconds; failed requests have 0 tokens."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_tokens if answer.success else 0 for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itl for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start_time for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def tpot(answer: TimedAnswer) -> float:
    """Mean seconds per token after the first; 0 for a single token."""
    return (answer.latency - answer.ttft) / (answer.output_tokens - 1) if answer.output_tokens > 1 else 0.0


def _is_good(answer: TimedAnswer, limits_ms: Mapping[str, float]) -> bool:
    seconds = {"ttft": answer.ttft, "tpot": tpot(answer), "e2el": answer.latency}
    return all(seconds[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _latencies(done: Sequence[TimedAnswer]) -> dict[str, list[float]]:
    return {
        "ttft": [answer.ttft for answer in done],
        "tpot": [tpot(answer) for answer in done if answer.output_tokens > 1],
        "itl": [gap for answer in done for gap in answer.itl],
        "e2el": [answer.latency for answer in done],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds or [0.0]) * 1e3
    figures = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    figures |= {f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles}
    return {f"{kind}_{name}_ms": float(value) for kind, value in figures.items()}


def _peaks(done: Sequence[TimedAnswer]) -> tuple[float, int]:
    """The most tokens, and the most running requests, in one second; seconds count from the first request."""
    if not done:
        return 0.0, 0
    first = min(answer.start_time for answer in done)
    num_seconds = math.ceil(max(answer.start_time + answer.latency for answer in done) - first) + 1
    tokens, requests = np.zeros(num_seconds), np.zeros(num_seconds, dtype=int)
    for answer in done:
        begin = answer.start_time - first
        times = begin + answer.ttft + np.cumsum([0.0, *answer.itl])
        np.add.at(tokens, times.astype(int), 1)
        requests[int(begin) : int(begin + answer.latency) + 1] += 1
    return float(tokens.max()), int(requests.max())
