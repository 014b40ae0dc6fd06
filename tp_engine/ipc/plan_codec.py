"""A step plan as bytes: fixed layout, little-endian, versioned, checksummed.  No pickle.

::

    offset
    0    | magic "TPSP" | version u32 | checksum u64: xxh3_64 of everything from offset 16 |
    16   | total bytes u32 | control u32 | step id i64 |
    32   | released R u32 | new blocks B u32 | copies C u32 | decodes D u32 | prefills P u32 | admitted A u32 |
    56   | released i32[R] | block_rows i32[B] | block_ids i32[B][G] | copies i32[C][2] | decode_rows i32[D] |
         | prefill_rows i32[P] | prefill_tokens i32[P] | prefill_samples u8[P] | zeros to a multiple of 8 |
         | masks, if bit 31 of control is set | admission 0 | admission 1 | ... | admission A-1 |

    Bits 24 to 26 of control are G - 1, the groups of layers that each new block is of; 0 in a plan without new blocks.
    If bit 30 of control is set, decode_rows are not there: they are the D rows of the plan before.

    masks, from a multiple of 8 on: only in steps with a row that a grammar restricts
    0    | rows M u32 | words W u32 | mask_rows i32[M] | masks i32[M][W] | zeros to a multiple of 8 |

    an admission, from a multiple of 8 on
    0    | row i32 | num_prompt_tokens i32 | num_computed_tokens i32 |
    12   | token ids T u32 | block ids K u32 | stop ids S u32 | bias entries E u32 | allowed ids L u32 |
    32   | temperature f64 | top_p f64 | min_p f64 | presence f64 | frequency f64 | repetition f64 | seed i64 |
    88   | top_k i32 | logprobs i32 | prompt_logprobs i32 | min_tokens i32 |
    104  | token_ids i32[T] | block_ids i32[K] | stop_token_ids i32[S] | bias_token_ids i32[E] |
         | allowed_token_ids i32[L] | bias_values f32[E] | zeros to a multiple of 8 |

A decode step of 256 rows, 16 of which begin a new block, takes 56 + 2 * 64 + 1024 = 1208 bytes, and 184 if the step
before was of the same rows, as most are.  Each group more takes 64.
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
from tp_engine.kv_layout import MAX_GROUPS
from tp_engine.plan import NO_IDS, NO_MASKS, Control, IntArray, StepPlan

MAGIC = b"TPSP"
VERSION = 2

_HEADER = struct.Struct("<4sIQIIq6I")
_UNSUMMED = struct.Struct("<4sIQ")  # the header up to what the checksum is of
_SUMMED = struct.Struct("<IIq6I")  # and from there on
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 8
_SUMMED_FROM = _UNSUMMED.size
_PADDING = bytes(ALIGNMENT // 2)  # behind an odd number of int32
_HAS_MASKS = 1 << 31  # in control: a step without masks has not a byte more
_REPEATS_ROWS = 1 << 30
_GROUPS_SHIFT = 24
_GROUPS = (MAX_GROUPS - 1) << _GROUPS_SHIFT
_NOT_STEADY = ~(_REPEATS_ROWS | _GROUPS)


def encode_plan(plan: StepPlan, *, repeats_rows: bool = False) -> bytes | bytearray:
    """The plan's bytes, laid out as drawn above.  ``TypeError`` for arrays of another dtype.

    ``repeats_rows``: the plan before has the same ``decode_rows``, so these are left out.

    Almost all plans are of new blocks and decodes only.  For them nothing is called that is not needed: who encodes one
    comes from other work and finds little of this in its core's caches.
    """
    rows, ids, decodes = plan.block_rows, plan.block_ids, plan.decode_rows
    if not (rows.dtype is ids.dtype is decodes.dtype is INT):
        check_dtypes((rows, ids, decodes))
    control, sent = int(plan.control), decodes
    if len(rows) != len(ids):
        control |= _groups_bits(len(rows), len(ids))
    if repeats_rows:
        control, sent = control | _REPEATS_ROWS, NO_IDS
    if plan.admitted or len(plan.prefill_rows) or len(plan.released) or len(plan.copies) or len(plan.mask_rows):
        return _encode_any(plan, control, sent)
    body = rows.tobytes() + ids.tobytes() if len(rows) else b""
    if len(sent):
        body += sent.tobytes()
    if len(body) % ALIGNMENT:
        body += _PADDING
    total = _HEADER.size + len(body)
    summed = _SUMMED.pack(total, control, plan.step_id, 0, len(rows), 0, len(decodes), 0, 0) + body
    return _UNSUMMED.pack(MAGIC, VERSION, xxhash.xxh3_64_intdigest(summed)) + summed


def _encode_any(plan: StepPlan, control: int, sent: IntArray) -> bytearray:
    """A plan that may have every section, with decode rows ``sent``.  It may be large, so that it is copied once."""
    ints = (
        plan.released,
        plan.block_rows,
        plan.block_ids,
        plan.copies,
        sent,
        plan.prefill_rows,
        plan.prefill_tokens,
    )
    check_dtypes(ints)
    released, blocks, num_ids, copies, num_sent, prefills, prefill_tokens = map(len, ints)
    assert prefills == prefill_tokens == len(plan.prefill_samples), "one of each per prefill"
    assert plan.prefill_samples.dtype == np.bool_, f"prefill_samples is {plan.prefill_samples.dtype}, not bool"
    end = _samples_offset(released, blocks + num_ids, copies, num_sent, prefills) + prefills
    parts: list[Part] = [bytes(_HEADER.size), *ints, plan.prefill_samples, bytes(aligned(end) - end)]
    if len(plan.mask_rows):
        control |= _HAS_MASKS
        parts += encode_masks(plan.mask_rows, plan.masks)
    for admission in plan.admitted:
        parts += encode_admission(admission)
    data = bytearray().join(parts)  # type: ignore[arg-type]  # arrays are buffers, which their stubs say from 3.12 on
    counts = (released, blocks, copies, len(plan.decode_rows), prefills, len(plan.admitted))
    _SUMMED.pack_into(data, _SUMMED_FROM, len(data), control, plan.step_id, *counts)
    _UNSUMMED.pack_into(data, 0, MAGIC, VERSION, xxhash.xxh3_64_intdigest(memoryview(data)[_SUMMED_FROM:]))
    return data


def decode_plan(buffer: Buffer, last_rows: IntArray = NO_IDS) -> StepPlan:
    """The plan in ``buffer``; its arrays are views, so ``buffer`` must outlive it unchanged.

    ``last_rows`` are the ``decode_rows`` of the plan before: this one's, as the same array, if it repeats them.

    ``PlanError`` for anything that ``encode_plan`` did not write, naming the field, what it must be and what it is.
    """
    size = len(buffer)
    if size < _HEADER.size:
        raise PlanError(f"truncated step plan: at least {_HEADER.size} bytes are needed, {size} received")
    header = _HEADER.unpack_from(buffer)
    magic, version, checksum, total, control, step_id, released, blocks, copies, decodes, prefills, admitted = header
    computed = xxhash.xxh3_64_intdigest(memoryview(buffer)[_SUMMED_FROM:])
    if magic != MAGIC or version != VERSION or total != size or checksum != computed:
        raise _fault(header, size, computed)
    repeats_rows = control & _REPEATS_ROWS
    if repeats_rows and decodes != len(last_rows):
        raise PlanError(f"step plan lost: step {step_id} repeats {decodes} rows, {len(last_rows)} were in the last one")
    if released or copies or prefills or admitted or control & _NOT_STEADY:
        return _decode_any(buffer, header, last_rows)
    end_of_ids = 2 * blocks
    if control & _GROUPS:
        end_of_ids += blocks * _extra_groups(control, blocks)
    num_ints = end_of_ids if repeats_rows else end_of_ids + decodes
    if total != _HEADER.size + (num_ints + num_ints % 2) * INT.itemsize:
        check_end(aligned(_HEADER.size + num_ints * INT.itemsize), total)
    if repeats_rows and not blocks:
        return StepPlan(step_id=step_id, decode_rows=last_rows)
    ints: IntArray = np.frombuffer(buffer, INT, num_ints, _HEADER.size)
    return StepPlan(
        step_id=step_id,
        block_rows=ints[:blocks],
        block_ids=ints[blocks:end_of_ids],
        decode_rows=last_rows if repeats_rows else ints[end_of_ids:],
    )


def _decode_any(buffer: Buffer, header: tuple[Any, ...], last_rows: IntArray) -> StepPlan:
    """A plan that may have every section."""
    _, _, _, total, control, step_id, released, blocks, copies, decodes, prefills, num_admitted = header
    repeats_rows = control & _REPEATS_ROWS
    num_sent = 0 if repeats_rows else decodes
    num_ids = blocks * (1 + _extra_groups(control, blocks))
    samples_offset = _samples_offset(released, blocks + num_ids, copies, num_sent, prefills)
    check_room("sections", samples_offset + prefills, total)
    offset, mask_rows, masks = aligned(samples_offset + prefills), NO_IDS, NO_MASKS
    if control & _HAS_MASKS:
        mask_rows, masks, offset = decode_masks(buffer, offset, total)
    admitted = decode_admissions(buffer, offset, num_admitted, total)
    sizes = (released, blocks, num_ids, 2 * copies, num_sent, prefills, prefills)
    parts = split_ints(buffer, _HEADER.size, sizes)
    return StepPlan(
        step_id=step_id,
        control=Control(control & ~(_HAS_MASKS | _REPEATS_ROWS | _GROUPS)),
        released=parts[0],
        admitted=admitted,
        block_rows=parts[1],
        block_ids=parts[2],
        copies=parts[3].reshape(-1, 2),
        decode_rows=last_rows if repeats_rows else parts[4],
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


def _fault(header: tuple[Any, ...], size: int, computed: int) -> PlanError:
    """What is wrong with an envelope: magic, version, length or checksum, in this order."""
    magic, version, checksum, total = header[:4]
    if magic != MAGIC:
        return PlanError(f"not a step plan: its magic must be {MAGIC!r}, received {magic!r}")
    if version != VERSION:
        return PlanError(f"step plan of another version: it must be {VERSION}, received {version}")
    if total != size:
        return PlanError(f"truncated step plan: it says {total} bytes, {size} received")
    return PlanError(f"corrupted step plan: its checksum says {checksum:#018x}, its bytes give {computed:#018x}")


def _groups_bits(blocks: int, num_ids: int) -> int:
    """What control says of ``num_ids`` ids for ``blocks`` new logical blocks."""
    groups = num_ids // blocks if blocks else 0
    assert 1 <= groups <= MAX_GROUPS and num_ids == blocks * groups, f"{num_ids} ids for {blocks} new blocks"
    return (groups - 1) << _GROUPS_SHIFT


def _extra_groups(control: int, blocks: int) -> int:
    """Groups beyond the first; ``PlanError`` if there are any in a plan without new blocks."""
    extra = (control & _GROUPS) >> _GROUPS_SHIFT
    if extra and not blocks:
        raise PlanError(f"malformed step plan: it says {extra + 1} groups of layers, and has no new blocks")
    return extra


def _samples_offset(released: int, blocks_and_ids: int, copies: int, decodes: int, prefills: int) -> int:
    num_ints = released + blocks_and_ids + 2 * (copies + prefills) + decodes
    return _HEADER.size + num_ints * INT.itemsize
