"""From a user's sampling parameters to what a row's sampler needs."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import xxhash

from tp_engine.plan import NO_FLOATS, NO_IDS, IntArray, RowSampling
from tp_engine.sampling_params import SamplingParams

_INT64_RANGE = 1 << 64
_INT64_HALF = 1 << 63


def base_seed(params: SamplingParams, engine_seed: int, request_number: int) -> int:
    """The user's seed, or one drawn from the engine's seed and the number of the request: equal in every run."""
    if params.seed is not None:
        return params.seed
    return xxhash.xxh3_64_intdigest(f"{engine_seed}:{request_number}".encode()) % _INT64_HALF


def row_sampling(params: SamplingParams, index: int, seed: int, stop_ids: Collection[int]) -> RowSampling:
    """Sampling of the sequence ``index``: its seed is ``seed + index``; only the first reports prompt logprobs.

    ``stop_ids`` (EOS ids included) travel only where ``min_tokens`` makes the sampler suppress them.
    """
    bias = params.logit_bias or {}
    prompt_logprobs = -1 if params.prompt_logprobs is None or index > 0 else params.prompt_logprobs
    return RowSampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=(seed + index + _INT64_HALF) % _INT64_RANGE - _INT64_HALF,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=params.min_tokens,
        stop_token_ids=_ids(sorted(stop_ids)) if params.min_tokens > 0 else NO_IDS,
        bias_token_ids=_ids(list(bias)),
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else NO_FLOATS,
        allowed_token_ids=_ids(list(params.allowed_token_ids or ())),
    )


def _ids(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32) if values else NO_IDS
