"""A sequence that enters the batch, from the decision until it has a row."""

from __future__ import annotations

import msgspec

from tp_engine.sched.cached_run import Place
from tp_engine.sched.kv_windows import Counts
from tp_engine.sched.lru_queue import BlockIds
from tp_engine.sched.sequence import Sequence


class Shared(msgspec.Struct, frozen=True):
    """The logical blocks that a table begins with, (n, G): in each group they are needed from ``first`` (G,) on, and 0
    before that.  ``held`` are those needed, logical block by logical block."""

    table: BlockIds
    first: Counts
    held: BlockIds


class Entry(msgspec.Struct):
    """It begins with ``shared`` blocks, which it holds already, and needs more up to its first ``end`` tokens.

    Its first ``num_computed`` tokens have K/V.  The first logical block behind the shared ones begins as a copy of
    ``source`` (G,), if there is one.  ``num_published`` and ``place`` are where it goes on in the prefix cache.
    """

    sequence: Sequence
    shared: Shared
    num_computed: int
    end: int
    source: BlockIds | None
    num_published: int
    place: Place
