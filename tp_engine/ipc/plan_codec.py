"""A step plan as bytes: little-endian, versioned, checksummed.  No pickle.

::

    offset
    0    | magic "TPSP" | version u32 | checksum u64: xxh3_64 of everything from offset 16 |
    16   | total bytes u32 | control u32 | step id i64 | rows epoch i64 |
    40   | sections u32: bit i for ``SECTIONS[i]`` | bytes of each section that is there u32[] | zeros |
         | the sections, in the table's order, each with zeros to a multiple of 8 |

    admissions, a section of N
    0    | N u32 | N records: scalars, lengths of arrays u32[] | arrays of admission 0 | of admission 1 | ... |

If the reader knows the rows of the plan's epoch from a plan before, ``decode_rows`` is left out.  ``plan_sections`` has
the table, and says how to add to it.

A decode step of 256 rows, 16 of which begin a new block, takes 56 + 2 * 64 + 1024 = 1208 bytes, and 184 if the reader
knows the rows, as it mostly does.  Each group of layers more takes 64.
"""

import struct
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from tp_engine.errors import PlanError
from tp_engine.ipc.plan_sections import ALIGNMENT, INT, SECTIONS, ArraySection, Buffer, Part, Section
from tp_engine.plan import NO_IDS, Control, IntArray, StepPlan

MAGIC = b"TPSP"
VERSION = 18

_HEADER = struct.Struct("<4sIQIIqqI")
_UNSUMMED = struct.Struct("<4sIQ")  # the header up to what the checksum is of
_SUMMED_FROM = _UNSUMMED.size
_SUMMED = "<IIqqI"  # and from there on, before the sections' sizes
_NUM_FIXED = 5
_TWO_SIZES = struct.Struct("<II")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 8
_PADDING = [bytes(count) for count in range(ALIGNMENT)]
_ROWS = "decode_rows"


class PlanCodec:
    """Plans of ``plan_type`` to bytes and back, by a table of sections."""

    def __init__(self, sections: Sequence[Section], plan_type: type[StepPlan] = StepPlan) -> None:
        names = [section.name for section in sections]
        self._sections, self._plan_type = sections, plan_type
        self._values = attrgetter(*names)
        arrays = [section for section in sections if isinstance(section, ArraySection) and section.per]
        self._related = [(array, names.index(array.name), names.index(array.per)) for array in arrays]
        self._rows_index = names.index(_ROWS)
        self._rows_bit = 1 << self._rows_index
        self._blocks_bits = sum(1 << names.index(name) for name in ("block_rows", "block_ids"))
        self._present = cache(lambda present: tuple(one for bit, one in enumerate(sections) if present >> bit & 1))

    def encode(self, plan: StepPlan, known_epoch: int = 0) -> bytes:
        """Return the plan's bytes, laid out as drawn above.  ``TypeError`` for arrays of another dtype.
        ``known_epoch``: that of the last plan before that had one, or 0 for a plan that must stand alone."""
        values = self._values(plan)
        counts = list(map(len, values))
        for array, index, owner in self._related:
            if counts[index] != counts[owner]:
                array.check(counts[index], counts[owner])
        if plan.rows_epoch:
            assert counts[self._rows_index], f"epoch {plan.rows_epoch} is of no rows"
            if plan.rows_epoch == known_epoch:
                counts[self._rows_index] = 0
        present, sizes, total = 0, [], _SUMMED_FROM
        parts: list[Part] = [b""]
        for index, count in enumerate(counts):
            if count:
                size = self._sections[index].encode(values[index], parts)
                padding = -size % ALIGNMENT
                if padding:
                    parts.append(_PADDING[padding])
                present |= 1 << index
                sizes.append(size)
                total += size + padding
        head = _head(len(sizes))
        total += head.size
        parts[0] = head.pack(total, plan.control, plan.step_id, plan.rows_epoch, present, *sizes)
        summed = b"".join(parts)  # type: ignore[arg-type]  # arrays are buffers, which their stubs say from 3.12 on
        return _UNSUMMED.pack(MAGIC, VERSION, xxhash.xxh3_64_intdigest(summed)) + summed

    def decode(self, buffer: Buffer, known_epoch: int = 0, known_rows: IntArray = NO_IDS) -> StepPlan:
        """Return the plan in ``buffer``; its arrays are views, so ``buffer`` must outlive it unchanged.

        ``known_epoch`` and ``known_rows`` are those of the last plan before that had an epoch; this plan has the very
        array if it leaves its rows out.

        ``PlanError``, with what it must be and what it is, for bytes that are not what ``encode`` wrote, by their
        checksum, and for rows left out that are not the known ones.
        """
        received = len(buffer)
        if received < _HEADER.size:
            raise PlanError(f"truncated step plan: at least {_HEADER.size} bytes are needed, {received} received")
        magic, version, checksum, total, control, step_id, epoch, present = _HEADER.unpack_from(buffer)
        computed = xxhash.xxh3_64_intdigest(memoryview(buffer)[_SUMMED_FROM:])
        if magic != MAGIC:
            raise PlanError(f"not a step plan: its magic must be {MAGIC!r}, received {magic!r}")
        if version != VERSION:
            raise PlanError(f"step plan of another version: it must be {VERSION}, received {version}")
        if total != received:
            raise PlanError(f"truncated step plan: it says {total} bytes, {received} received")
        if checksum != computed:
            raise PlanError(f"corrupted step plan: its checksum says {checksum:#018x}, its bytes give {computed:#018x}")
        if epoch == known_epoch != 0 == control and (present == 0 or present == self._blocks_bits):
            return self._decode_steady(buffer, present, step_id, epoch, known_rows)
        sections = self._present(present)
        head = _head(len(sections))
        offset = _SUMMED_FROM + head.size
        fields: dict[str, Any] = {"step_id": step_id, "rows_epoch": epoch}
        for section, size in zip(sections, head.unpack_from(buffer, _SUMMED_FROM)[_NUM_FIXED:], strict=True):
            fields[section.name] = section.decode(buffer, offset, size, fields)
            offset += size + -size % ALIGNMENT
        if epoch and not present & self._rows_bit:
            if epoch != known_epoch:
                raise PlanError(
                    f"step plan lost: step {step_id} leaves out the rows of epoch {epoch}, the last known ones are of "
                    f"epoch {known_epoch}"
                )
            fields[_ROWS] = known_rows
        if control:
            fields["control"] = Control(control)
        return self._plan_type(**fields)

    def _decode_steady(self, buffer: Buffer, present: int, step_id: int, epoch: int, known_rows: IntArray) -> StepPlan:
        """``decode`` a plan with known rows and new blocks alone, as most are.  A reader that has just been woken finds
        little in its caches: the general way takes it 10 us longer."""
        if not present:
            return self._plan_type(step_id=step_id, rows_epoch=epoch, decode_rows=known_rows)
        rows_bytes, ids_bytes = _TWO_SIZES.unpack_from(buffer, _HEADER.size)
        ids_start = rows_bytes + -rows_bytes % ALIGNMENT
        ints: IntArray = np.frombuffer(buffer, INT, (ids_start + ids_bytes) // 4, _SUMMED_FROM + _head(2).size)
        return self._plan_type(
            step_id=step_id,
            rows_epoch=epoch,
            block_rows=ints[: rows_bytes // 4],
            block_ids=ints[ids_start // 4 :],
            decode_rows=known_rows,
        )


_CODEC = PlanCodec(SECTIONS)
encode_plan = _CODEC.encode
decode_plan = _CODEC.decode


def plan_checksum(data: Buffer) -> int:
    """Return the checksum that an encoded plan carries: two ranks that saw equal ones saw equal plans."""
    checksum: int = _CHECKSUM.unpack_from(data, _CHECKSUM_OFFSET)[0]
    return checksum


@cache
def _head(num_sections: int) -> struct.Struct:
    """What is summed of the header: up to where the first section begins."""
    size = struct.calcsize(f"{_SUMMED}{num_sections}I")
    return struct.Struct(f"{_SUMMED}{num_sections}I{-size % ALIGNMENT}x")
