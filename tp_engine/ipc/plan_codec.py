"""A step plan as bytes: fixed layout, little-endian, versioned, checksummed.  No pickle.

::

    offset
    0    | magic "TPSP" | version u32 | checksum u64: xxh3_64 of everything from offset 16 |
    16   | total bytes u32 | control u32 | step id i64 |
    32   | released R u32 | new blocks B u32 | copies C u32 | decodes D u32 | prefills P u32 | admitted A u32 |
    56   | released i32[R] | block_rows i32[B] | block_ids i32[B] | copies i32[C][2] | decode_rows i32[D] |
         | prefill_rows i32[P] | prefill_tokens i32[P] | prefill_samples u8[P] | zeros to a multiple of 8 |
         | admission 0 | admission 1 | ... | admission A-1 |

    an admission, from a multiple of 8 on
    0    | row i32 | num_prompt_tokens i32 | num_computed_tokens i32 |
    12   | token ids T u32 | block ids K u32 | stop ids S u32 | bias entries E u32 | allowed ids L u32 |
    32   | temperature f64 | top_p f64 | min_p f64 | presence f64 | frequency f64 | repetition f64 | seed i64 |
    88   | top_k i32 | logprobs i32 | prompt_logprobs i32 | min_tokens i32 |
    104  | token_ids i32[T] | block_ids i32[K] | stop_token_ids i32[S] | bias_token_ids i32[E] |
         | allowed_token_ids i32[L] | bias_values f32[E] | zeros to a multiple of 8 |

A decode step of 256 rows, 16 of which begin a new block, takes 56 + 2 * 64 + 1024 = 1208 bytes.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import xxhash

from tp_engine.errors import PlanError
from tp_engine.plan import Admission, Control, IntArray, RowSampling, StepPlan

MAGIC = b"TPSP"
VERSION = 1

Buffer: TypeAlias = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<4sIQ")
_HEADER = struct.Struct("<IIq6I")
_FIRST_SECTION = _PREFIX.size + _HEADER.size
_ADMISSION = struct.Struct("<iii5I6dqiiii")
_ALIGNMENT = 8
_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


def encode_plan(plan: StepPlan) -> bytes:
    """The plan's bytes, laid out as drawn above."""
    assert len(plan.block_rows) == len(plan.block_ids), "a new block is a row and a block id"
    assert len(plan.prefill_rows) == len(plan.prefill_tokens) == len(plan.prefill_samples), "one of each per prefill"
    assert plan.prefill_samples.dtype == np.bool_, f"prefill_samples is {plan.prefill_samples.dtype}, not bool"
    ints = _join_ints(
        plan.released,
        plan.block_rows,
        plan.block_ids,
        plan.copies.reshape(-1),
        plan.decode_rows,
        plan.prefill_rows,
        plan.prefill_tokens,
    )
    sections = _pad(ints.tobytes() + plan.prefill_samples.tobytes())
    admissions = b"".join([_encode_admission(admission) for admission in plan.admitted])
    header = _HEADER.pack(
        _FIRST_SECTION + len(sections) + len(admissions),
        plan.control,
        plan.step_id,
        len(plan.released),
        len(plan.block_rows),
        len(plan.copies),
        len(plan.decode_rows),
        len(plan.prefill_rows),
        len(plan.admitted),
    )
    body = header + sections + admissions
    return _PREFIX.pack(MAGIC, VERSION, xxhash.xxh3_64_intdigest(body)) + body


def decode_plan(buffer: Buffer) -> StepPlan:
    """The plan in ``buffer``; its arrays are views, so ``buffer`` must outlive it unchanged.

    ``PlanError`` for anything that ``encode_plan`` did not write, naming the field, what it must be and what it is.
    """
    _check_envelope(buffer)
    total, control, step_id, *counts = _HEADER.unpack_from(buffer, _PREFIX.size)
    released, blocks, copies, decodes, prefills, num_admitted = counts
    sizes = (released, blocks, blocks, 2 * copies, decodes, prefills, prefills)
    num_ints = sum(sizes)
    samples_offset = _FIRST_SECTION + num_ints * _INT.itemsize
    _check_end("sections", samples_offset + prefills, total)
    parts = _split_ints(buffer, _FIRST_SECTION, sizes)
    return StepPlan(
        step_id=step_id,
        control=Control(control),
        released=parts[0],
        admitted=_decode_admissions(buffer, _aligned(samples_offset + prefills), num_admitted, total),
        block_rows=parts[1],
        block_ids=parts[2],
        copies=parts[3].reshape(-1, 2),
        decode_rows=parts[4],
        prefill_rows=parts[5],
        prefill_tokens=parts[6],
        prefill_samples=np.frombuffer(buffer, np.bool_, prefills, samples_offset),
    )


def _check_envelope(buffer: Buffer) -> None:
    """Magic, version, length and checksum, in this order."""
    size = len(buffer)
    if size < _FIRST_SECTION:
        raise PlanError(f"truncated step plan: at least {_FIRST_SECTION} bytes are needed, {size} received")
    magic, version, checksum = _PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise PlanError(f"not a step plan: its magic must be {MAGIC!r}, received {magic!r}")
    if version != VERSION:
        raise PlanError(f"step plan of another version: it must be {VERSION}, received {version}")
    total: int = _HEADER.unpack_from(buffer, _PREFIX.size)[0]
    if total != size:
        raise PlanError(f"truncated step plan: it says {total} bytes, {size} received")
    if (computed := xxhash.xxh3_64_intdigest(memoryview(buffer)[_PREFIX.size :])) != checksum:
        raise PlanError(f"corrupted step plan: its checksum says {checksum:#018x}, its bytes give {computed:#018x}")


def _check_end(what: str, end: int, total: int) -> None:
    if end > total:
        raise PlanError(f"malformed step plan: its {what} end at byte {end}, the plan ends at {total}")


def _encode_admission(admission: Admission) -> bytes:
    sampling = admission.sampling
    assert len(sampling.bias_token_ids) == len(sampling.bias_values), "a bias is a token id and a value"
    assert sampling.bias_values.dtype == _FLOAT, f"bias_values is {sampling.bias_values.dtype}, not float32"
    ids = (
        admission.token_ids,
        admission.block_ids,
        sampling.stop_token_ids,
        sampling.bias_token_ids,
        sampling.allowed_token_ids,
    )
    fixed = _ADMISSION.pack(
        admission.row,
        admission.num_prompt_tokens,
        admission.num_computed_tokens,
        *map(len, ids),
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
    return _pad(fixed + _join_ints(*ids).tobytes() + sampling.bias_values.tobytes())


def _decode_admissions(buffer: Buffer, offset: int, count: int, total: int) -> tuple[Admission, ...]:
    """``count`` admissions from ``offset`` to exactly the plan's end."""
    admissions = []
    for _ in range(count):
        _check_end("admissions", offset + _ADMISSION.size, total)
        admission, offset = _decode_admission(buffer, offset, total)
        admissions.append(admission)
    if offset != total:
        raise PlanError(f"malformed step plan: its parts end at byte {offset}, the plan ends at {total}")
    return tuple(admissions)


def _decode_admission(buffer: Buffer, offset: int, total: int) -> tuple[Admission, int]:
    """The admission at ``offset``, and the offset after it."""
    fields = _ADMISSION.unpack_from(buffer, offset)
    row, num_prompt_tokens, num_computed_tokens = fields[:3]
    sizes = fields[3:8]
    temperature, top_p, min_p, presence, frequency, repetition, seed = fields[8:15]
    top_k, logprobs, prompt_logprobs, min_tokens = fields[15:]
    ids_offset = offset + _ADMISSION.size
    bias_offset = ids_offset + sum(sizes) * _INT.itemsize
    num_bias = sizes[3]
    end = _aligned(bias_offset + num_bias * _FLOAT.itemsize)
    _check_end("admissions", end, total)
    token_ids, block_ids, stop_token_ids, bias_token_ids, allowed_token_ids = _split_ints(buffer, ids_offset, sizes)
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
        stop_token_ids=stop_token_ids,
        bias_token_ids=bias_token_ids,
        bias_values=np.frombuffer(buffer, _FLOAT, num_bias, bias_offset),
        allowed_token_ids=allowed_token_ids,
    )
    admission = Admission(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling,
    )
    return admission, end


def _join_ints(*arrays: IntArray) -> IntArray:
    """One int32 array of all; ``TypeError`` for any other dtype, which would lose bits."""
    return np.concatenate(arrays, dtype=_INT, casting="equiv")


def _split_ints(buffer: Buffer, offset: int, sizes: tuple[int, ...]) -> list[IntArray]:
    """Views of consecutive int32 arrays of these sizes, from byte ``offset``."""
    ints: IntArray = np.frombuffer(buffer, _INT, sum(sizes), offset)
    return [ints[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT


def _pad(data: bytes) -> bytes:
    """``data`` with zeros up to the alignment; every part begins at a multiple of it."""
    return data + bytes(-len(data) % _ALIGNMENT)
