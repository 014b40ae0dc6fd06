"""Whether the ranks use symmetric memory: found out step by step, and agreed on, so that all do or none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tp_engine.log import get_logger
from tp_engine.progress import RankProgress
from tp_engine.ranks.agreement import Agreeing, all_do
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.reduce_plan import Machine, plan_reduces
from tp_engine.ranks.symmetric_memory import OwnMemory, SymmetricCommunicator, check_sums

logger = get_logger(__name__)


def with_symmetric_memory(
    library: Communicator,
    machine: Machine,
    allocate: Callable[[int], OwnMemory],
    host: Agreeing,
    progress: RankProgress,
    *,
    device: torch.device,
    largest_bytes: int,
    is_required: bool,
    fuses_norm: bool = False,
) -> Communicator:
    """``library`` with its smaller all-reduces through shared memory, or, where a rank can not, as it is.

    ``allocate(num_bytes)`` makes a rank's own buffer.  All ranks have one before the first begins to map those of the
    others: there it would wait for a rank that does not come until torch's store gives up.  Raises ``RankError``
    instead where ``is_required``.  ``largest_bytes`` are those of the largest tensor of a step.
    """
    together = partial(all_do, host, "symmetric memory", "symm_mem", is_required=is_required)
    num_bytes = plan_reduces(replace(machine, has_multicast=True), largest_bytes).buffer_bytes
    own = together(lambda: allocate(num_bytes))
    buffer = None if own is None else together(own.share)
    if buffer is None:
        return library
    multicasts = all(word == b"1" for word in host.all_gather_bytes(b"1" if buffer.has_multicast else b"0"))
    plan = plan_reduces(replace(machine, has_multicast=multicasts), largest_bytes)
    made = SymmetricCommunicator(library, buffer, plan, progress, fuses_norm=fuses_norm)
    if together(lambda: check_sums(made, library, device)) is None:
        return library
    if host.info.is_first:
        logger.info("all-reduces of up to %d bytes use symmetric memory: %s", plan.buffer_bytes, plan)
    return made
