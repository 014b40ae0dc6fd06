"""A step plan as bytes: fixed layout, little-endian, versioned, checksummed.  No pickle.

::

    offset
    0    | magic "TPSP" | version u32 | checksum u64: xxh3_64 of everything from offset 16 |
    16   | total bytes u32 | control u32 | step id i64 |
    32   | released R u32 | new blocks B u32 | copies C u32 | decodes D u32 | prefills P u32 | admitted A u32 |
    56   | released i32[R] | block_rows i32[B] | block_ids i32[B] | copies i32[C][2] | decode_rows i32[D] |
         | prefill_rows i32[P] | prefill_tokens i32[P] | prefill_samples u8[P] | zeros to a multiple of 8 |
         | masks, if bit 31 of control is set | admission 0 | admission 1 | ... | admission A-1 |

    masks, from a multiple of 8 on: only in steps with a row that a grammar restricts
    0    | rows M u32 | words W u32 | mask_rows i32[M] | masks i32[M][W] | zeros to a multiple of 8 |

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
from typing import Any

import numpy as np
import xxhash

from tp_engine.errors import PlanError
from tp_engine.ipc.admission_codec import (
    ALIGNMENT,
    INT,
    Buffer,
    Part,
    aligned,
    check_dtypes,
    check_end,
    check_room,
    decode_admissions,
    encode_admission,
    split_ints,
)
from tp_engine.ipc.mask_codec import decode_masks, encode_masks
from tp_engine.plan import NO_IDS, NO_MASKS, Control, IntArray, StepPlan

MAGIC = b"TPSP"
VERSION = 1

_HEADER = struct.Struct("<4sIQIIq6I")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 8
_SUMMED_FROM = 16
_NO_HEADER = bytes(_HEADER.size)
_PADDING = bytes(ALIGNMENT // 2)  # behind an odd number of int32
_HAS_MASKS = 1 << 31  # in control: a step without masks has not a byte more


def encode_plan(plan: StepPlan) -> bytearray:
    """The plan's bytes, laid out as drawn above.  ``TypeError`` for arrays of another dtype."""
    if not (plan.admitted or len(plan.prefill_rows) or len(plan.released) or len(plan.copies) or len(plan.mask_rows)):
        return _encode_steady(plan)
    ints = (
        plan.released,
        plan.block_rows,
        plan.block_ids,
        plan.copies,
        plan.decode_rows,
        plan.prefill_rows,
        plan.prefill_tokens,
    )
    check_dtypes(ints)
    released, blocks, block_ids, copies, decodes, prefills, prefill_tokens = map(len, ints)
    assert blocks == block_ids, "a new block is a row and a block id"
    assert prefills == prefill_tokens == len(plan.prefill_samples), "one of each per prefill"
    assert plan.prefill_samples.dtype == np.bool_, f"prefill_samples is {plan.prefill_samples.dtype}, not bool"
    end = _samples_offset(released, blocks, copies, decodes, prefills) + prefills
    parts: list[Part] = [_NO_HEADER, *ints, plan.prefill_samples, bytes(aligned(end) - end)]
    control = int(plan.control)
    if len(plan.mask_rows):
        control |= _HAS_MASKS
        parts += encode_masks(plan.mask_rows, plan.masks)
    for admission in plan.admitted:
        parts += encode_admission(admission)
    data = bytearray().join(parts)  # type: ignore[arg-type]  # arrays are buffers, which their stubs say from 3.12 on
    return _seal(data, control, plan.step_id, released, blocks, copies, decodes, prefills, len(plan.admitted))


def _encode_steady(plan: StepPlan) -> bytearray:
    """A plan of new blocks and decodes only, as almost all are: what is absent costs nothing."""
    ints = (plan.block_rows, plan.block_ids, plan.decode_rows)
    check_dtypes(ints)
    blocks, decodes = len(plan.block_rows), len(plan.decode_rows)
    assert blocks == len(plan.block_ids), "a new block is a row and a block id"
    padding = _PADDING if decodes % 2 else b""
    data = bytearray().join((_NO_HEADER, *ints, padding))  # type: ignore[arg-type]  # as above
    return _seal(data, int(plan.control), plan.step_id, 0, blocks, 0, decodes, 0, 0)


def _seal(data: bytearray, control: int, step_id: int, *counts: int) -> bytearray:
    """Write the header, the checksum last."""
    _HEADER.pack_into(data, 0, MAGIC, VERSION, 0, len(data), control, step_id, *counts)
    _CHECKSUM.pack_into(data, _CHECKSUM_OFFSET, _sum(data))
    return data


def decode_plan(buffer: Buffer) -> StepPlan:
    """The plan in ``buffer``; its arrays are views, so ``buffer`` must outlive it unchanged.

    ``PlanError`` for anything that ``encode_plan`` did not write, naming the field, what it must be and what it is.
    """
    _, _, _, total, control_bits, step_id, released, blocks, copies, decodes, prefills, num_admitted = _open(buffer)
    samples_offset = _samples_offset(released, blocks, copies, decodes, prefills)
    if not (released or copies or prefills or num_admitted or control_bits & _HAS_MASKS):
        check_end(aligned(samples_offset), total)
        return _decode_steady(buffer, step_id, control_bits, blocks, decodes)
    check_room("sections", samples_offset + prefills, total)
    offset, mask_rows, masks = aligned(samples_offset + prefills), NO_IDS, NO_MASKS
    if control_bits & _HAS_MASKS:
        mask_rows, masks, offset = decode_masks(buffer, offset, total)
    admitted = decode_admissions(buffer, offset, num_admitted, total)
    sizes = (released, blocks, blocks, 2 * copies, decodes, prefills, prefills)
    parts = split_ints(buffer, _HEADER.size, sizes)
    return StepPlan(
        step_id=step_id,
        control=Control(control_bits & ~_HAS_MASKS),
        released=parts[0],
        admitted=admitted,
        block_rows=parts[1],
        block_ids=parts[2],
        copies=parts[3].reshape(-1, 2),
        decode_rows=parts[4],
        prefill_rows=parts[5],
        prefill_tokens=parts[6],
        prefill_samples=np.frombuffer(buffer, np.bool_, prefills, samples_offset),
        mask_rows=mask_rows,
        masks=masks,
    )


def plan_checksum(data: Buffer) -> int:
    """The checksum that an encoded plan carries: two ranks that saw equal ones saw equal plans."""
    checksum: int = _CHECKSUM.unpack_from(data, _CHECKSUM_OFFSET)[0]
    return checksum


def _open(buffer: Buffer) -> tuple[Any, ...]:
    """Check magic, version, length and checksum, in this order; the header."""
    size = len(buffer)
    if size < _HEADER.size:
        raise PlanError(f"truncated step plan: at least {_HEADER.size} bytes are needed, {size} received")
    header = _HEADER.unpack_from(buffer)
    magic, version, checksum, total = header[:4]
    if magic != MAGIC:
        raise PlanError(f"not a step plan: its magic must be {MAGIC!r}, received {magic!r}")
    if version != VERSION:
        raise PlanError(f"step plan of another version: it must be {VERSION}, received {version}")
    if total != size:
        raise PlanError(f"truncated step plan: it says {total} bytes, {size} received")
    if (computed := _sum(buffer)) != checksum:
        raise PlanError(f"corrupted step plan: its checksum says {checksum:#018x}, its bytes give {computed:#018x}")
    return header


def _decode_steady(buffer: Buffer, step_id: int, control_bits: int, blocks: int, decodes: int) -> StepPlan:
    """A plan of new blocks and decodes only."""
    ints: IntArray = np.frombuffer(buffer, INT, 2 * blocks + decodes, _HEADER.size)
    return StepPlan(
        step_id=step_id,
        control=Control(control_bits) if control_bits else Control.NONE,
        block_rows=ints[:blocks],
        block_ids=ints[blocks : 2 * blocks],
        decode_rows=ints[2 * blocks :],
    )


def _samples_offset(released: int, blocks: int, copies: int, decodes: int, prefills: int) -> int:
    num_ints = released + 2 * (blocks + copies + prefills) + decodes
    return _HEADER.size + num_ints * INT.itemsize


def _sum(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(data)[_SUMMED_FROM:])
