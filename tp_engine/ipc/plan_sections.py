"""The sections of an encoded step plan: one table, from which the codec, the sizes and the checks are made.

A section is a field of ``StepPlan``: an array, the admissions, or bytes.  A plan has only those that are not empty.  To
add an array to the plan, add a field with an empty default to ``StepPlan`` and a line to ``SECTIONS``; a section of a
feature is in its ``Feature`` (``features/registry.py``), and its value among the plan's ``extensions``; to add one of a
row's parameters, a field to ``RowSampling`` or ``Admission`` and a line to ``ADMISSIONS``.  Either makes another
``plan_codec.VERSION``.

``encode`` appends what a value consists of to ``parts``, to be joined, and returns its size in bytes; ``TypeError`` for
another dtype.  ``decode`` returns the value in ``size`` bytes from ``offset`` on, as views, given the ``fields`` before
it.  These bytes are what ``encode`` wrote: the codec has compared their checksum and version.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.features.registry import PlanSection, plan_sections
from tp_engine.model_config.kv_layout import MAX_GROUPS
from tp_engine.plan import Admission, RowSampling, StepPlan

Buffer: TypeAlias = bytes | bytearray | memoryview
AnyArray: TypeAlias = npt.NDArray[Any]
Part: TypeAlias = bytes | AnyArray

INT, FLOAT, BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype(np.bool_)
ALIGNMENT = 8  # of sections
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

    @cached_property
    def absent(self) -> AnyArray:
        """What a plan has without this section."""
        return np.empty((0, max(self._columns, 0)) if self._columns else 0, self.dtype)

    def of(self, plan: StepPlan) -> AnyArray:
        """Return a feature's section of the plan, empty if it has none."""
        found: AnyArray = plan.extensions.get(self.name, self.absent)
        return found

    def encode(self, value: AnyArray, parts: list[Part]) -> int:
        if value.dtype is not self.dtype and value.dtype != self.dtype:
            raise TypeError(f"{self.name} of a step plan is an array of {self.dtype}, received {value.dtype}")
        assert value.ndim == self._num_dimensions, f"{self.name} has the shape {value.shape}"
        parts.append(value)
        return value.nbytes

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> AnyArray:
        values: AnyArray = np.frombuffer(buffer, self.dtype, size // self.dtype.itemsize, offset)
        if self._columns == ANY:
            return values.reshape(len(fields[self.per]), -1)
        return values.reshape(-1, self._columns) if self._columns else values

    def check(self, count: int, num_owners: int) -> None:
        """Assert that ``count`` items of this section may belong to ``num_owners`` of section ``per``."""
        fits = count == num_owners or (num_owners > 0 == count % num_owners and 0 < count <= num_owners * self._most)
        assert fits, f"{count} {self.name} for {num_owners} {self.per}"


class AdmissionSection:
    """The admissions: a record of fixed size for each, then the arrays of all of them.  ``scalars`` maps fields to
    struct's codes; each of ``arrays`` has items of 4 bytes and one dimension.  Fields of ``Admission.sampling`` begin
    with ``sampling.`` and come last."""

    def __init__(self, name: str, scalars: Mapping[str, str], arrays: Sequence[ArraySection]) -> None:
        self.name, self._arrays = name, arrays
        self._record = struct.Struct(f"<{''.join(scalars.values())}{len(arrays)}I")
        names = [array.name for array in arrays]
        self._get_scalars, self._get_arrays = attrgetter(*scalars), attrgetter(*names)
        self._related = [(array, names.index(array.name), names.index(array.per)) for array in arrays if array.per]
        self._num_own = sum(not scalar.startswith(_SAMPLING) for scalar in scalars)
        self._scalars = [scalar.removeprefix(_SAMPLING) for scalar in scalars]

    def encode(self, value: Sequence[Admission], parts: list[Part]) -> int:
        place = len(parts)
        parts.append(b"")
        records, size = [_COUNT.pack(len(value))], _COUNT.size + len(value) * self._record.size
        for admission in value:
            arrays = self._get_arrays(admission)
            lengths = list(map(len, arrays))
            for array, index, owner in self._related:
                array.check(lengths[index], lengths[owner])
            records.append(self._record.pack(*self._get_scalars(admission), *lengths))
            for index, length in enumerate(lengths):
                if length:
                    size += self._arrays[index].encode(arrays[index], parts)
        parts[place] = b"".join(records)
        return size

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> tuple[Admission, ...]:
        start = _COUNT.size + _COUNT.unpack_from(buffer, offset)[0] * self._record.size
        items = np.frombuffer(buffer, INT, (size - start) // INT.itemsize, offset + start)
        return tuple(self._admissions(memoryview(buffer)[offset + _COUNT.size : offset + start], items))

    def _admissions(self, records: memoryview, items: AnyArray) -> Iterator[Admission]:
        first, last, place = self._num_own, len(self._scalars), 0
        for values in self._record.iter_unpack(records):
            own = dict(zip(self._scalars[:first], values, strict=False))
            sampling = dict(zip(self._scalars[first:], values[first:], strict=False))
            for array, length in zip(self._arrays, values[last:], strict=True):
                part, place = items[place : place + length], place + length
                if not array.name.startswith(_SAMPLING):
                    own[array.name] = part
                elif length:
                    sampling[array.name.removeprefix(_SAMPLING)] = part.view(array.dtype)
            yield Admission(sampling=RowSampling(**sampling), **own)


class BytesSection:
    """Bytes as they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, value: bytes, parts: list[Part]) -> int:
        parts.append(value)
        return len(value)

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> bytes:
        return bytes(memoryview(buffer)[offset : offset + size])


class NumberSection:
    """An int of 64 bits; 0 is absent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, plan: StepPlan) -> int:
        """Return a feature's section of the plan, 0 if it has none."""
        found: int = plan.extensions.get(self.name, 0)
        return found

    def encode(self, value: int, parts: list[Part]) -> int:
        parts.append(_NUMBER.pack(value))
        return _NUMBER.size

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> int:
        return int(_NUMBER.unpack_from(buffer, offset)[0])


class ExtensionSection:
    """The sections of features, by name; ``sections`` gives all that there may be, in the same order on all ranks::

    | N u32 | N pairs: index among all u32, bytes u32 | zeros | N sections, each with zeros to a multiple of 8 |
    """

    def __init__(self, name: str, sections: Callable[[], Iterable[PlanSection]]) -> None:
        self.name, self._sections = name, sections

    @cached_property
    def _table(self) -> dict[str, tuple[int, PlanSection]]:
        return {section.name: (index, section) for index, section in enumerate(self._sections())}

    @cached_property
    def _rows(self) -> list[PlanSection]:
        return [section for _, section in self._table.values()]

    def encode(self, value: Mapping[str, Any], parts: list[Part]) -> int:
        place = len(parts)
        parts.append(b"")
        head, total = [len(value)], 0
        for name, item in value.items():
            index, section = self._table[name]
            size = section.encode(item, parts)
            parts.append(bytes(-size % ALIGNMENT))
            head += (index, size)
            total += size + -size % ALIGNMENT
        packed = struct.pack(f"<{len(head)}I", *head)
        parts[place] = packed + bytes(-len(packed) % ALIGNMENT)
        return len(parts[place]) + total

    def decode(self, buffer: Buffer, offset: int, size: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        (count,) = _COUNT.unpack_from(buffer, offset)
        head = struct.unpack_from(f"<{2 * count}I", buffer, offset + _COUNT.size)
        place = _COUNT.size + 4 * len(head)
        found: dict[str, Any] = {}
        place += -place % ALIGNMENT
        for index, length in zip(head[::2], head[1::2], strict=True):
            section = self._rows[index]
            found[section.name] = section.decode(buffer, offset + place, length, found)
            place += length + -length % ALIGNMENT
        return found


_COUNT = struct.Struct("<I")
_NUMBER = struct.Struct("<q")

ADMISSIONS = AdmissionSection(
    "admitted",
    {
        "row": "i",
        "num_prompt_tokens": "i",
        "num_computed_tokens": "i",
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

Section: TypeAlias = ArraySection | AdmissionSection | BytesSection | ExtensionSection

SECTIONS: tuple[Section, ...] = (
    ArraySection("released"),
    ArraySection("block_rows"),
    ArraySection("block_ids", per="block_rows", most=MAX_GROUPS),
    ArraySection("copies", columns=2),
    ArraySection("decode_rows"),
    ArraySection("prefill_rows"),
    ArraySection("prefill_tokens", per="prefill_rows"),
    ArraySection("prefill_samples", BOOL, per="prefill_rows"),
    ADMISSIONS,
    ArraySection("state_copies", columns=2),
    ArraySection("images", columns=5),
    ArraySection("encodes", columns=12),
    ArraySection("image_rows", columns=3),
    BytesSection("order"),
    ExtensionSection("extensions", plan_sections),
)
"""A section's place here is its bit in the header, and its place among the sections of a plan."""
