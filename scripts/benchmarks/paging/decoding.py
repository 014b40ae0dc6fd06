"""Decode one request with a KV cache and without one; without it, every token costs a pass over all earlier tokens.

Without a cache each token is a separate request: its prompt is all tokens so far, it generates one token, and the cache
keeps nothing of it.  With a ``stride`` above 1 only every ``stride``-th token is computed this way; its time counts for
its neighbours too.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.offline.engines import TpEngine
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams

DOCUMENTED = 6.4
"""The goal: how many times faster 2000 tokens are with a cache."""

PROMPT_TOKENS = 16


def compare_decoding(engine: TpEngine, *, vocab_size: int, num_tokens: int, stride: int) -> dict[str, Any]:
    """Time both ways on the same prompt; the engine must not cache prefixes.

    ``points`` are (token, milliseconds with, milliseconds without).  ``equal_tokens`` is the share of tokens that are
    equal with and without a cache.
    """
    rng = np.random.default_rng(0)
    generate(engine, rng.integers(3, vocab_size, PROMPT_TOKENS).tolist(), min(8, num_tokens))
    prompt = rng.integers(3, vocab_size, PROMPT_TOKENS).tolist()
    tokens, with_cache = generate(engine, prompt, num_tokens)
    chosen = list(range(stride // 2, num_tokens, stride))
    generate(engine, prompt + tokens, 1)
    points, equal = [], 0
    for position in chosen:
        again, taken = generate(engine, prompt + tokens[:position], 1)
        equal += again == [tokens[position]]
        near = with_cache[max(0, position - stride // 2) : position + stride // 2 + 1]
        points.append((position, 1e3 * float(np.median(near)), 1e3 * taken[0]))
    seconds, without_s = sum(with_cache), sum(point[2] for point in points) / 1e3 * num_tokens / len(points)
    return {
        "tokens": num_tokens,
        "stride": stride,
        "with_cache_s": round(seconds, 4),
        "without_cache_s": round(without_s, 4),
        "ratio": round(without_s / seconds, 2),
        "goal": DOCUMENTED,
        "equal_tokens": round(equal / len(points), 4),
        "points": [(position, round(cached, 4), round(uncached, 4)) for position, cached, uncached in points],
    }


def generate(engine: TpEngine, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens of a greedy answer, and the seconds of each; the first time includes the prompt."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    core = engine.llm.engine
    tokens: list[int] = []
    seconds: list[float] = []
    last_s = time.perf_counter()
    core.add_request(EngineRequest(request_id="decoding", prompt_token_ids=prompt, params=params))
    while core.has_unfinished:
        for delta in core.step():
            now_s = time.perf_counter()
            tokens += delta.new_token_ids
            seconds.append(now_s - last_s)
            last_s = now_s
    return tokens, seconds
