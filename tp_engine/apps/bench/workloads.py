"""Seeded workloads of the offline benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BenchWorkload:
    """Prompts (token ids) and the number of tokens to generate for each; greedy, EOS ignored.  All prompts begin with
    the same ``num_shared`` tokens; with a prefix cache these are computed once."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    num_shared: int = 0

    @property
    def num_output_tokens(self) -> int:
        """The number of requested tokens; throughput counts these for every engine."""
        return sum(self.max_tokens)


def latency(vocab_size: int, seed: int) -> BenchWorkload:
    """One request: 128 tokens in, 128 out."""
    rng = np.random.default_rng(seed)
    return BenchWorkload("latency", [rng.integers(3, vocab_size, 128).tolist()], [128])


def throughput(vocab_size: int, seed: int) -> BenchWorkload:
    """32 requests at once: 16 to 128 tokens in, 16 to 128 out."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab_size, size).tolist() for size in rng.integers(16, 129, 32)]
    return BenchWorkload("throughput", prompts, rng.integers(16, 129, 32).tolist())


def shared_prefix(vocab_size: int, seed: int) -> BenchWorkload:
    """32 requests of 256 shared and 16 own tokens, 16 tokens out; every seed has a different prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, vocab_size, 256).tolist()
    prompts = [prefix + rng.integers(3, vocab_size, 16).tolist() for _ in range(32)]
    return BenchWorkload("shared prefix", prompts, [16] * 32, num_shared=256)


def batch256(vocab_size: int, seed: int) -> BenchWorkload:
    """256 requests at once: 100 to 1024 tokens in, 100 to 1024 out.  The lengths are the same for every seed."""
    rng, lengths = np.random.default_rng(seed), np.random.default_rng(0)
    prompts = [rng.integers(3, min(vocab_size, 10_000), size).tolist() for size in lengths.integers(100, 1025, 256)]
    return BenchWorkload("256 requests", prompts, lengths.integers(100, 1025, 256).tolist())


def batch32(vocab_size: int, seed: int) -> BenchWorkload:
    """The first 32 requests of ``batch256``."""
    all_requests = batch256(vocab_size, seed)
    return BenchWorkload("32 requests", all_requests.prompts[:32], all_requests.max_tokens[:32])


WORKLOADS = {
    "latency": latency,
    "throughput": throughput,
    "shared_prefix": shared_prefix,
    "batch32": batch32,
    "batch256": batch256,
}
SMALL_WORKLOADS = ("latency", "throughput", "shared_prefix")
LARGE_WORKLOADS = ("latency", "batch256")
