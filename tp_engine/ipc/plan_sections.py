"""The sections of an encoded step plan: one table, from which the codec, the sizes and the checks are made.

A section is a field of ``StepPlan``: an array, the admissions, bytes, or a number.  A plan has only those that are not
empty, or 0.  To add an array to the plan, add a field with an empty default to ``StepPlan`` and a line to ``SECTIONS``;
to add one of a row's parameters, a field to ``RowSampling`` or ``Admission`` and a line to ``ADMISSIONS``.  Either
makes another ``plan_codec.VERSION``.

``encode`` appends what a value consists of to ``parts``, to be joined, and returns its size in bytes; ``TypeError`` for
another dtype.  ``decode`` returns the value in ``size`` bytes from ``offset`` on, as views, given the ``fields`` before
it; ``PlanError`` for anything that ``encode`` did not write.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.errors import PlanError
from tp_engine.kv_layout import MAX_GROUPS
from tp_engine.plan import Admission, RowSampling

Buffer: TypeAlias = bytes | bytearray | memoryview
AnyArray: TypeAlias = npt.NDArray[Any]
Part: TypeAlias = bytes | AnyArray

INT, FLOAT, BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype(np.bool_)
ANY = -1  # number of columns: whatever the array has
_SAMPLING = "sampling."


class ArraySection:
    """An array of ``dtype`` with one dimension, or two where it has ``columns``.  ``per`` names an earlier section, for
    each item of which this one has equally many: 1 up to ``most``."""

    def __init__(
        self, name: str, dtype: np.dtype[Any] = INT, *, columns: int = 0, per: str = "", most: int = 1
    ) -> None:
        self.name, self.dtype, self.per, self._most = name, dtype, per, most
        self._columns = columns
        self._num_dimensions = 2 if columns else 1
        self._item_bytes = dtype.itemsize * max(columns, 1)

    def encode(self, value: AnyArray, parts: list[Part]) -> int:
        if value.dtype is not self.dtype and value.dtype != self.dtype:
            raise TypeError(f"{self.name} of a step plan is an array of {self.dtype}, received {value.dtype}")
        assert value.ndim == self._num_dimensions, f"{self.name} has the shape {value.shape}"
        parts.append(value)
        return value.nbytes

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> AnyArray:
        num_owners = len(fields[self.per]) if self.per else 0
        if self.per and not num_owners:
            raise PlanError(f"malformed step plan: its {self.name} are there, and its {self.per} are empty")
        item_bytes = self._item_bytes if self._columns != ANY else self._item_bytes * num_owners
        if size % item_bytes:
            raise PlanError(f"malformed step plan: its {self.name} take {size} bytes, not a multiple of {item_bytes}")
        values: AnyArray = np.frombuffer(buffer, self.dtype, size // self.dtype.itemsize, offset)
        if self._columns:
            values = values.reshape((num_owners, -1) if self._columns == ANY else (-1, self._columns))
        if self.per and not self.fits(len(values), num_owners):
            raise PlanError(f"malformed step plan: {self.misfit(len(values), num_owners)}")
        return values

    def fits(self, count: int, num_owners: int) -> bool:
        """Return whether so many items of this section may belong to so many of section ``per``."""
        return count == num_owners or (num_owners > 0 == count % num_owners and 0 < count <= num_owners * self._most)

    def misfit(self, count: int, num_owners: int) -> str:
        """Return what is wrong where they do not fit."""
        return f"{count} {self.name} for {num_owners} {self.per}"


class AdmissionSection:
    """The admissions: a record of fixed size for each, then the arrays of all of them.  ``scalars`` maps fields to
    struct's codes; each of ``arrays`` has items of 4 bytes and one dimension.  Fields of ``Admission.sampling`` begin
    with ``sampling.`` and come last."""

    def __init__(self, name: str, scalars: Mapping[str, str], arrays: Sequence[ArraySection]) -> None:
        self.name, self._arrays = name, arrays
        self._record = struct.Struct(f"<{''.join(scalars.values())}{len(arrays)}I")
        self._get_scalars = attrgetter(*scalars)
        self._get_arrays = attrgetter(*(array.name for array in arrays))
        self._scalars = _split(list(scalars))
        names = [array.name for array in arrays]
        self._related = [(array, names.index(array.name), names.index(array.per)) for array in arrays if array.per]
        own, sampling = _split(names)
        dtypes = [array.dtype for array in arrays]
        self._named_arrays = [*zip(own, dtypes, strict=False)], [*zip(sampling, dtypes[len(own) :], strict=True)]

    def encode(self, value: Sequence[Admission], parts: list[Part]) -> int:
        place = len(parts)
        parts.append(b"")
        records, size = [_COUNT.pack(len(value))], _COUNT.size + len(value) * self._record.size
        for admission in value:
            arrays = self._get_arrays(admission)
            lengths = list(map(len, arrays))
            for array, index, owner in self._related:
                assert lengths[index] == lengths[owner], array.misfit(lengths[index], lengths[owner])
            records.append(self._record.pack(*self._get_scalars(admission), *lengths))
            for index, length in enumerate(lengths):
                if length:
                    size += self._arrays[index].encode(arrays[index], parts)
        parts[place] = b"".join(records)
        return size

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> tuple[Admission, ...]:
        count = _COUNT.unpack_from(buffer, offset)[0] if size >= _COUNT.size else 0
        start = _COUNT.size + count * self._record.size
        if not count or start > size or size % INT.itemsize:
            raise PlanError(f"malformed step plan: its {self.name} take {size} bytes, {count} need at least {start}")
        items = np.frombuffer(buffer, INT, (size - start) // INT.itemsize, offset + start)
        records = memoryview(buffer)[offset + _COUNT.size : offset + start]
        return tuple(self._admissions(records, items))

    def _admissions(self, records: memoryview, items: AnyArray) -> Iterator[Admission]:
        own_scalars, sampling_scalars = self._scalars
        own_arrays, sampling_arrays = self._named_arrays
        first, last = len(own_scalars), len(own_scalars) + len(sampling_scalars)
        place = 0
        for values in self._record.iter_unpack(records):
            own = dict(zip(own_scalars, values, strict=False))
            sampling = dict(zip(sampling_scalars, values[first:], strict=False))
            lengths = values[last:]
            for (name, _), length in zip(own_arrays, lengths, strict=False):
                own[name] = items[place : place + length]  # shorter, if the length is wrong: seen at the end
                place += length
            if any(lengths[len(own_arrays) :]):
                for array, index, owner in self._related:
                    if lengths[index] != lengths[owner]:
                        raise PlanError(f"malformed step plan: {array.misfit(lengths[index], lengths[owner])}")
                for (name, dtype), length in zip(sampling_arrays, lengths[len(own_arrays) :], strict=True):
                    if length:
                        sampling[name] = items[place : place + length].view(dtype)
                        place += length
            yield Admission(sampling=RowSampling(**sampling), **own)
        if place != len(items):
            raise PlanError(f"malformed step plan: its {self.name} have {place} array items, {len(items)} are there")


class BytesSection:
    """Bytes as they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, value: bytes, parts: list[Part]) -> int:
        parts.append(value)
        return len(value)

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> bytes:
        if not size:
            raise PlanError(f"malformed step plan: its {self.name} is there, and is empty")
        return bytes(memoryview(buffer)[offset : offset + size])


class NumberSection:
    """An int of 64 bits; 0 is absent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, value: int, parts: list[Part]) -> int:
        parts.append(_NUMBER.pack(value))
        return _NUMBER.size

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> int:
        if size != _NUMBER.size:
            raise PlanError(f"malformed step plan: its {self.name} takes {size} bytes, it must be {_NUMBER.size}")
        value: int = _NUMBER.unpack_from(buffer, offset)[0]
        if not value:
            raise PlanError(f"malformed step plan: its {self.name} is there, and is 0")
        return value


def _split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """An admission's own names, and those of its sampling."""
    own = [name for name in names if not name.startswith(_SAMPLING)]
    sampling = [name.removeprefix(_SAMPLING) for name in names[len(own) :]]
    return own, sampling


_COUNT = struct.Struct("<I")
_NUMBER = struct.Struct("<q")

ADMISSIONS = AdmissionSection(
    "admitted",
    {
        "row": "i",
        "num_prompt_tokens": "i",
        "num_computed_tokens": "i",
        "adapter": "i",
        "sampling.temperature": "d",
        "sampling.top_p": "d",
        "sampling.min_p": "d",
        "sampling.presence_penalty": "d",
        "sampling.frequency_penalty": "d",
        "sampling.repetition_penalty": "d",
        "sampling.seed": "q",
        "sampling.top_k": "i",
        "sampling.logprobs": "i",
        "sampling.prompt_logprobs": "i",
        "sampling.min_tokens": "i",
        "sampling.pools": "i",
    },
    (
        ArraySection("token_ids"),
        ArraySection("block_ids"),
        ArraySection("sampling.stop_token_ids"),
        ArraySection("sampling.bias_token_ids"),
        ArraySection("sampling.allowed_token_ids"),
        ArraySection("sampling.bias_values", FLOAT, per="sampling.bias_token_ids"),
        ArraySection("sampling.pooled_token_ids"),
    ),
)

Section: TypeAlias = ArraySection | AdmissionSection | BytesSection | NumberSection

SECTIONS: tuple[Section, ...] = (
    ArraySection("released"),
    ArraySection("block_rows"),
    ArraySection("block_ids", per="block_rows", most=MAX_GROUPS),
    ArraySection("copies", columns=2),
    ArraySection("decode_rows"),
    ArraySection("prefill_rows"),
    ArraySection("prefill_tokens", per="prefill_rows"),
    ArraySection("prefill_samples", BOOL, per="prefill_rows"),
    ArraySection("mask_rows"),
    ArraySection("masks", columns=ANY, per="mask_rows"),
    ADMISSIONS,
    ArraySection("stores", columns=2),
    ArraySection("loads", columns=2),
    ArraySection("disk_reads", columns=2),
    ArraySection("disk_writes", columns=2),
    ArraySection("state_copies", columns=2),
    ArraySection("draft_base_rows"),
    ArraySection("draft_tokens", per="draft_base_rows"),
    ArraySection("kept_rows"),
    ArraySection("kept_tokens", per="kept_rows"),
    ArraySection("adapter_loads", columns=2),
    ArraySection("adapter_drops"),
    ArraySection("images", columns=5),
    ArraySection("encodes", columns=10),
    ArraySection("image_rows", columns=3),
    BytesSection("order"),
    NumberSection("wait_load"),
    NumberSection("num_drafts"),
)
"""A section's place here is its bit in the header, and its place among the sections of a plan.  Numbers come last."""
