"""A sequence that enters the batch, from the decision until it has a row."""

from __future__ import annotations

import msgspec

from tp_engine.sched.cached_run import Place
from tp_engine.sched.lru_queue import BlockIds
from tp_engine.sched.sequence import Sequence


class Entry(msgspec.Struct):
    """It begins with ``shared`` blocks, which it holds already, and needs more up to its first ``end`` tokens.

    Its first ``num_computed`` tokens have K/V.  Block number ``len(shared)`` begins as a copy of ``source``, if there
    is one.  ``num_published`` and ``place`` are where it goes on in the prefix cache.
    """

    sequence: Sequence
    shared: BlockIds
    num_computed: int
    end: int
    source: int | None
    num_published: int
    place: Place
