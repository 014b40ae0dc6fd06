"""Which requests are let in, and what they become."""

from __future__ import annotations

import struct

import numpy as np

from tp_engine.errors import RequestError
from tp_engine.plan import IntArray
from tp_engine.request import EngineRequest
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.row_sampling import base_seed, row_sampling
from tp_engine.sched.sequence import RequestGroup, Sequence


def build_group(request: EngineRequest, limits: SchedulerLimits, number: int) -> RequestGroup:
    """The sequences of a request, the ``number``-th of this engine.  Raises ``RequestError`` if it can never fit."""
    prompt = _prompt_array(request)
    _check_length(request, limits)
    params = request.params
    eos = frozenset(() if params.ignore_eos else request.eos_token_ids)
    group = RequestGroup(
        request=request,
        number=number,
        salt=params.cache_salt or "",
        eos_token_ids=eos,
        stop_token_ids=frozenset(params.stop_token_ids),
        num_unfinished=params.n,
    )
    seed = base_seed(params, limits.seed, number)
    longest = limits.max_sequence_tokens
    max_tokens = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
    for index in range(params.n):
        key = (request.priority, number, index)
        sampling = row_sampling(params, index, seed, eos | group.stop_token_ids)
        group.sequences.append(Sequence(group, index, key, sampling, prompt, len(prompt), max_tokens))
    return group


def _prompt_array(request: EngineRequest) -> IntArray:
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    try:
        count = len(request.prompt_token_ids)
        packed = bytearray(struct.pack(f"<{count}i", *request.prompt_token_ids))  # in half of numpy's time
    except struct.error as error:
        raise RequestError(f"the prompt is not a list of token ids: {error}", param="prompt") from error
    prompt: IntArray = np.frombuffer(packed, dtype="<i4")
    if prompt.min() < 0:
        raise RequestError(f"the prompt contains {prompt.min()}; token ids are not negative", param="prompt")
    return prompt


def _check_length(request: EngineRequest, limits: SchedulerLimits) -> None:
    length = len(request.prompt_token_ids)
    if length > limits.max_model_len - 1:
        raise RequestError(
            f"the prompt has {length} tokens; at most {limits.max_model_len - 1} fit, because max_model_len is "
            f"{limits.max_model_len} and one token is generated. Shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if length > limits.capacity_tokens:
        groups = f", one for each of {limits.num_groups} groups of layers" if limits.num_groups > 1 else ""
        raise RequestError(
            f"the prompt has {length} tokens; the KV cache holds {limits.capacity_tokens} in all "
            f"({limits.num_blocks} blocks of {limits.block_size}{groups}). Shorten the prompt, or give the cache more "
            "memory",
            param="prompt",
            code="context_length_exceeded",
        )
