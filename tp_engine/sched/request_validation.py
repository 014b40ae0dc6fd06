"""Which requests the scheduler accepts, and the sequences that it makes of them."""

import struct
from collections.abc import Collection
from functools import partial

import numpy as np
import xxhash

from tp_engine.errors import RequestError
from tp_engine.plan import NO_FLOATS, NO_IDS, POOLS_ALL, POOLS_LAST, POOLS_NONE, IntArray, RowSampling
from tp_engine.requests.request import EngineRequest
from tp_engine.sched.blocks.cache_keys import CacheKeys
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.sequence import RequestGroup, Sequence
from tp_engine.sched.waiting_queue import turn_of

_INT64_RANGE = 1 << 64
_INT64_HALF = 1 << 63


def build_group(
    request: EngineRequest, limits: SchedulerLimits, number: int, body: int, cache_keys: CacheKeys
) -> RequestGroup:
    """Return a request with its first sequence, the ``number``-th of this engine and of its ``body``-th body, which
    ``InputProcessor`` has checked.  ``RequestError`` if the KV cache can never hold it."""
    _check_length(request, limits)
    token_ids = request.prompt_token_ids
    packed = bytearray(struct.pack(f"<{len(token_ids)}i", *token_ids))  # takes half of numpy's time
    prompt: IntArray = np.frombuffer(packed, dtype="<i4")
    params = request.params
    # Where the user gives no seed, it follows from the engine's and the request's number: equal in every run.
    drawn = xxhash.xxh3_64_intdigest(f"{limits.seed}:{number}".encode()) % _INT64_HALF
    seed = drawn if params.seed is None else params.seed
    longest = limits.max_sequence_tokens
    max_total_tokens = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
    if request.pooling is not None:  # its one token is never read, and may lie beyond the context
        max_total_tokens = len(prompt) + 1
    group = RequestGroup(
        request=request,
        number=number,
        cache_key=cache_keys.of_request(request),
        eos_token_ids=frozenset(() if params.ignore_eos else request.eos_token_ids),
        stop_token_ids=frozenset(params.stop_token_ids),
        prompt=prompt,
        make=partial(_make_sequence, body=body, seed=seed, max_total_tokens=max_total_tokens),
        num_unmade=params.n,
        num_unfinished=params.n,
    )
    group.make_next()
    return group


def _make_sequence(group: RequestGroup, index: int, *, body: int, seed: int, max_total_tokens: int) -> Sequence:
    request, prompt = group.request, group.prompt
    place = request.place * request.params.n + index
    key = (request.priority, turn_of(body, place), group.number, index)
    sampling = _row_sampling(request, index, seed, group.eos_token_ids | group.stop_token_ids)
    return Sequence(group, index, key, sampling, prompt, len(prompt), max_total_tokens, place)


def _check_length(request: EngineRequest, limits: SchedulerLimits) -> None:
    length = len(request.prompt_token_ids)
    if length > limits.capacity_tokens:
        groups = f", one for each of {limits.num_groups} groups of layers" if limits.num_groups > 1 else ""
        raise RequestError(
            f"the prompt has {length} tokens; the KV cache holds {limits.capacity_tokens} in all "
            f"({limits.num_blocks} blocks of {limits.block_size}{groups}). Shorten the prompt, or give the cache more "
            "memory",
            param=request.prompt_field,
            code="context_length_exceeded",
        )


def _row_sampling(request: EngineRequest, index: int, seed: int, stop_ids: Collection[int]) -> RowSampling:
    """What the sampler needs to know of sequence ``index``: its seed is ``seed + index``; only the first reports prompt
    logprobs.  ``stop_ids`` (EOS ids included) travel only where ``min_tokens`` makes the sampler suppress them."""
    params, pooling = request.params, request.pooling
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
        pools=POOLS_NONE if pooling is None else POOLS_ALL if pooling.per_token else POOLS_LAST,
        stop_token_ids=_ids(sorted(stop_ids)) if params.min_tokens > 0 else NO_IDS,
        bias_token_ids=_ids(list(bias)),
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else NO_FLOATS,
        allowed_token_ids=_ids(list(params.allowed_token_ids or ())),
        pooled_token_ids=_ids(list(() if pooling is None else pooling.token_ids)),
    )


def _ids(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32) if values else NO_IDS
