"""One admission of a step plan as bytes; ``plan_codec`` draws the layout."""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.errors import PlanError
from tp_engine.plan import NO_FLOATS, NO_IDS, Admission, IntArray, RowSampling

Buffer: TypeAlias = bytes | bytearray | memoryview
Part: TypeAlias = bytes | npt.NDArray[np.generic]

ALIGNMENT = 8
INT = np.dtype("<i4")

_FIXED = struct.Struct("<iii5I6dqiiii")
_FLOAT = np.dtype("<f4")


def encode_admission(admission: Admission) -> list[Part]:
    """The parts of an admission, to be joined; together they fill a multiple of ``ALIGNMENT``."""
    sampling = admission.sampling
    assert len(sampling.bias_token_ids) == len(sampling.bias_values), "a bias is a token id and a value"
    assert sampling.bias_values.dtype == _FLOAT, f"bias_values is {sampling.bias_values.dtype}, not float32"
    tokens, blocks = admission.token_ids, admission.block_ids
    stops, biased, allowed = sampling.stop_token_ids, sampling.bias_token_ids, sampling.allowed_token_ids
    optional: tuple[Part, ...] = ()
    if not (stops is biased is allowed is NO_IDS):
        check_dtypes((stops, biased, allowed))
        optional = (stops, biased, allowed, sampling.bias_values)
    check_dtypes((tokens, blocks))
    sizes = len(tokens), len(blocks), len(stops), len(biased), len(allowed)
    fixed = _FIXED.pack(
        admission.row,
        admission.num_prompt_tokens,
        admission.num_computed_tokens,
        *sizes,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.seed,
        sampling.top_k,
        sampling.logprobs,
        sampling.prompt_logprobs,
        sampling.min_tokens,
    )
    num_bytes = _FIXED.size + (sum(sizes) + len(sampling.bias_values)) * INT.itemsize
    return [fixed, tokens, blocks, *optional, bytes(-num_bytes % ALIGNMENT)]


def decode_admissions(buffer: Buffer, offset: int, count: int, total: int) -> tuple[Admission, ...]:
    """``count`` admissions from ``offset`` to exactly the plan's end; ``PlanError`` if they end elsewhere."""
    ints: IntArray = np.frombuffer(buffer, INT, total // INT.itemsize)
    admissions = []
    for _ in range(count):
        check_room("admissions", offset + _FIXED.size, total)
        admission, offset = _decode_admission(buffer, ints, offset, total)
        admissions.append(admission)
    check_end(offset, total)
    return tuple(admissions)


def _decode_admission(buffer: Buffer, ints: IntArray, offset: int, total: int) -> tuple[Admission, int]:
    """The admission at ``offset``, and the offset after it; ``ints`` are the whole buffer's."""
    fields = _FIXED.unpack_from(buffer, offset)
    row, num_prompt_tokens, num_computed_tokens, num_tokens, num_blocks, num_stops, num_biased, num_allowed = fields[:8]
    temperature, top_p, min_p, presence, frequency, repetition, seed = fields[8:15]
    top_k, logprobs, prompt_logprobs, min_tokens = fields[15:]
    start = (offset + _FIXED.size) // INT.itemsize
    blocks = start + num_tokens
    optional = blocks + num_blocks
    end = aligned((optional + num_stops + 2 * num_biased + num_allowed) * INT.itemsize)
    check_room("admissions", end, total)
    stops, biased, allowed, biases = NO_IDS, NO_IDS, NO_IDS, NO_FLOATS
    if num_stops or num_biased or num_allowed:
        parts = np.split(ints[optional:], np.cumsum((num_stops, num_biased, num_allowed, num_biased)))
        stops, biased, allowed, biases = *parts[:3], parts[3].view(_FLOAT)
    sampling = RowSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        bias_token_ids=biased,
        bias_values=biases,
        allowed_token_ids=allowed,
    )
    admission = Admission(
        row=row,
        token_ids=ints[start:blocks],
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=ints[blocks:optional],
        sampling=sampling,
    )
    return admission, end


def check_dtypes(arrays: tuple[IntArray, ...]) -> None:
    """``TypeError`` for any dtype but int32: another would lose bits or be read as something else."""
    for array in arrays:
        if array.dtype is not INT and array.dtype != INT:
            raise TypeError(f"a step plan holds int32 arrays, received {array.dtype}")


def check_room(what: str, end: int, total: int) -> None:
    """``PlanError`` if a part would end behind the plan."""
    if end > total:
        raise PlanError(f"malformed step plan: its {what} end at byte {end}, the plan ends at {total}")


def check_end(end: int, total: int) -> None:
    """``PlanError`` if the parts do not end where the plan does."""
    if end != total:
        raise PlanError(f"malformed step plan: its parts end at byte {end}, the plan ends at {total}")


def split_ints(buffer: Buffer, offset: int, sizes: tuple[int, ...]) -> list[IntArray]:
    """Views of consecutive int32 arrays of these sizes, from byte ``offset``; most are empty, and cost nothing."""
    ints: IntArray = np.frombuffer(buffer, INT, sum(sizes), offset)
    parts: list[IntArray] = []
    start = 0
    for size in sizes:
        parts.append(ints[start : start + size] if size else NO_IDS)
        start += size
    return parts


def aligned(offset: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return offset + -offset % ALIGNMENT
