"""The requests of the serving benchmark, and their times.

Prompts are random token ids or the lines of a file.  As in ``vllm bench serve``, gaps between arrivals follow a gamma
distribution of shape ``burstiness``: 1 is a Poisson process, a smaller value makes bursts, a larger one is steadier.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Request:
    """``prompt`` is text or token ids; the answer has exactly ``max_tokens`` tokens if the server ignores EOS."""

    prompt: str | list[int]
    max_tokens: int


def make_requests(args: argparse.Namespace, num_requests: int, seed: int) -> list[Request]:
    """The requests of one rate; a new ``seed`` gives new prompts, which no cache knows."""
    if args.dataset_path is not None:
        return file_requests(args.dataset_path, num_requests, args.output_len)
    return random_requests(
        num_requests,
        seed,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        vocab_size=args.vocab_size,
    )


def random_requests(
    num_requests: int,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab_size: int = 10_000,
) -> list[Request]:
    """Prompts of random ids after a shared prefix; lengths are uniform within ``range_ratio`` of the given length."""
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return list(map(int, rng.integers(max(1, low), high + 1, num_requests)))

    prefix = rng.integers(3, vocab_size, prefix_len).tolist()
    sizes = zip(lengths(input_len), lengths(output_len), strict=True)
    return [Request(prefix + rng.integers(3, vocab_size, size).tolist(), out) for size, out in sizes]


def file_requests(path: Path, num_requests: int, output_len: int) -> list[Request]:
    """Read ``{"prompt": text or ids, "output_tokens": 64}`` lines (the second is optional); too few lines repeat."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found.append(Request(record["prompt"], int(record.get("output_tokens", output_len))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(
                f'{path}:{number}: {error!r}; each line must be JSON such as {{"prompt": "..."}}'
            ) from error
    if not found:
        raise SystemExit(f"{path} holds no prompts")
    return [found[index % len(found)] for index in range(num_requests)]


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """The seconds after the start at which each request is sent; an infinite ``rate`` sends all at once.  Times are
    scaled so that the last request comes after ``num_requests / rate`` seconds; every seed is the same load."""
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), num_requests)
    times = np.cumsum(gaps)
    return list(map(float, times * (num_requests / rate / times[-1])))
