"""Whether the ranks use symmetric memory: found out step by step, and agreed on, so that all do or none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from tp_engine.dist.collectives import Communicator
from tp_engine.dist.rank import RankInfo
from tp_engine.dist.reduce_plan import Machine, plan_reduces
from tp_engine.dist.symmetric_memory import SymmetricBuffer, SymmetricCommunicator, first_disagreement
from tp_engine.errors import RankError
from tp_engine.faults import PhaseNote
from tp_engine.log import get_logger

logger = get_logger(__name__)


class Agreeing(Protocol):
    """The collective on the host that the decision needs."""

    info: RankInfo

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""


def with_symmetric_memory(
    library: Communicator,
    machine: Machine,
    make_buffer: Callable[[int], SymmetricBuffer],
    host: Agreeing,
    note: PhaseNote,
    *,
    device: torch.device,
    largest_bytes: int,
    is_required: bool,
    fuses_norm: bool = False,
) -> Communicator:
    """``library`` with its smaller all-reduces through shared memory, or, where a rank can not, as it is.

    ``make_buffer(num_bytes)`` maps the ranks' buffers, a collective.  Raises ``RankError`` instead where
    ``is_required``.  ``largest_bytes`` are those of the largest tensor of a step.
    """
    try:
        buffer = make_buffer(plan_reduces(replace(machine, has_multicast=True), largest_bytes).buffer_bytes)
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if not _agree(host, failure, is_required):
        return library
    multicasts = all(word == b"1" for word in host.all_gather_bytes(b"1" if buffer.has_multicast else b"0"))
    plan = plan_reduces(replace(machine, has_multicast=multicasts), largest_bytes)
    made = SymmetricCommunicator(library, buffer, plan, note, fuses_norm=fuses_norm)
    try:
        failure = first_disagreement(made, library, device) or ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if not _agree(host, failure, is_required):
        return library
    if host.info.is_first:
        logger.info("all-reduces of up to %d bytes use symmetric memory: %s", plan.buffer_bytes, plan)
    return made


def _agree(host: Agreeing, failure: str, is_required: bool) -> bool:
    """Whether no rank has a failure."""
    reports = [report.decode() for report in host.all_gather_bytes(failure.encode())]
    failed = next((rank for rank, report in enumerate(reports) if report), None)
    if failed is None:
        return True
    if is_required:
        raise RankError(failed, f"all_reduce is symm_mem, but symmetric memory failed: {reports[failed]}; use auto")
    if host.info.is_first:
        logger.warning("no symmetric memory, all-reduces go to the library: rank %d: %s", failed, reports[failed])
    return False
