"""A feature's part of a record of the core, which passes it on unread.

::

    EngineRequest, StepPlan, Sequence, SchedulerLimits, SchedulerStats
        extensions   {"kv_events": KVEventCounters(...), ...}        only the features that have something there

An ``Extension`` is the typed key to one of these parts.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

Part = TypeVar("Part")


class Extensible(Protocol):
    """A record with room for features."""

    @property
    def extensions(self) -> dict[str, Any]: ...


class Extension(Generic[Part]):
    """The part called ``name`` of a kind of record, of the type ``kind``."""

    def __init__(self, name: str, kind: type[Part]) -> None:
        self.name, self.kind = name, kind

    def get(self, record: Extensible) -> Part | None:
        """Return the record's part; None if it has none.  What came from another process as plain data becomes a
        ``kind`` here, once."""
        found = record.extensions.get(self.name)
        if found is not None and not isinstance(found, self.kind):
            found = record.extensions[self.name] = msgspec.convert(found, self.kind)
        return found

    def of(self, record: Extensible) -> Part:
        """Return the record's part, which is made with its defaults if there is none yet."""
        found = self.get(record)
        if found is None:
            found = record.extensions[self.name] = self.kind()
        return found
