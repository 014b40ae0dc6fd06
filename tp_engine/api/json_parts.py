"""JSON in parts: the encoder holds the GIL, so a long text is not encoded at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_PART = 2048  # values; about 50 KiB
_NESTED = (dict, list, tuple)
_NESTED_TYPES = frozenset(_NESTED)
_encode = msgspec.json.Encoder().encode


def json_parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON text of ``value`` in parts of about 50 KiB; texts are not divided."""
    if _count(value) < _PART or not isinstance(value, _NESTED):
        yield _encode(value)
    elif isinstance(value, dict):
        yield from _mapping_parts(value)
    else:
        yield from _list_parts(value)


def _mapping_parts(value: dict[Any, Any]) -> Iterator[bytes]:
    begin = b"{"
    group: dict[Any, Any] = {}
    size = 0
    for key, one in value.items():
        count = _count(one)
        if group and size + count >= _PART:
            yield begin + _encode(group)[1:-1]
            begin, group, size = b",", {}, 0
        if count >= _PART:
            yield begin + _encode({key: 0})[1:-2]
            yield from json_parts(one)
            begin = b","
        else:
            group[key] = one
            size += count
    yield (begin + _encode(group)[1:-1] if group else b"") + b"}"


def _list_parts(value: Sequence[Any]) -> Iterator[bytes]:
    begin, start, size = b"[", 0, 0
    for place, one in enumerate(value):
        count = _count(one)
        if place > start and size + count >= _PART:
            yield begin + _encode(value[start:place])[1:-1]
            begin, start, size = b",", place, 0
        if count >= _PART:
            yield begin
            yield from json_parts(one)
            begin, start = b",", place + 1
        else:
            size += count
    yield (begin + _encode(value[start:])[1:-1] if start < len(value) else b"") + b"]"


def _count(value: Any) -> int:
    """The number of values within ``value``; counting stops at ``_PART`` or more."""
    count, open_ones = 1, [value]
    while open_ones and count < _PART:
        one = open_ones.pop()
        if isinstance(one, dict):
            inner = one.values()
        elif isinstance(one, (list, tuple)):
            inner = one  # type: ignore[assignment]
        else:
            continue
        count += len(inner)
        if count < _PART and not _NESTED_TYPES.isdisjoint(map(type, inner)):
            open_ones += [each for each in inner if isinstance(each, _NESTED)]
    return count
