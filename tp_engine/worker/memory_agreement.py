"""All ranks end with the same number of KV blocks, or all with the same error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tp_engine.errors import MemoryBudgetError
from tp_engine.log import get_logger
from tp_engine.ranks.rank import RankInfo

logger = get_logger(__name__)

_FAILED, _FINE = 0, 1
_RANK_BITS = 20
_MAX_BLOCKS = 1 << 40  # more is a bug of whoever counted


class AgreementGroup(Protocol):
    """The collectives on the CPU that the agreement needs; ranks/groups.py has the real one."""

    info: RankInfo

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Element-wise minimum over ranks, int64."""

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """``num_blocks`` is the smallest of all ranks', first found on ``limiting_rank``; ``largest`` is the largest."""

    num_blocks: int
    largest: int
    limiting_rank: int


def agree_on_blocks(local: int | Exception, group: AgreementGroup) -> Agreement:
    """Take the smallest ``local`` number of blocks.  Every rank calls this, a rank that failed with its exception.

    One all-reduce MIN carries all that is needed::

        status              FAILED is less than FINE: one failure is everybody's
        blocks << 20 | rank the smallest number, and the first rank that has it
        -blocks             the largest number

    Raises ``MemoryBudgetError`` naming every rank that failed, with its cause, on all ranks alike.
    """
    failure = _failure(local)
    blocks = local if isinstance(local, int) and failure is None else 0
    status, smallest, minus_largest = group.all_reduce_min(
        [_FINE if failure is None else _FAILED, blocks << _RANK_BITS | group.info.rank, -blocks]
    )
    if status == _FINE:
        agreement = Agreement(
            num_blocks=smallest >> _RANK_BITS, largest=-minus_largest, limiting_rank=smallest & (1 << _RANK_BITS) - 1
        )
        _log(agreement, group.info)
        return agreement
    causes = group.all_gather_bytes((failure or "").encode())
    failed = [f"rank {rank}: {cause.decode()}" for rank, cause in enumerate(causes) if cause]
    raise MemoryBudgetError(
        f"{len(failed)} of {group.info.world_size} ranks could not provide a KV cache: {'; '.join(failed)}",
        rank=next(rank for rank, cause in enumerate(causes) if cause),
    ) from (local if isinstance(local, Exception) else None)


def _failure(local: int | Exception) -> str | None:
    """Why ``local`` can not be agreed on, or None."""
    if isinstance(local, Exception):
        return f"{type(local).__name__}: {local}"
    if not 0 < local <= _MAX_BLOCKS:
        return f"it counted {local} KV blocks, where 1 to {_MAX_BLOCKS} are possible"
    return None


def _log(agreement: Agreement, info: RankInfo) -> None:
    if info.is_first and info.world_size > 1:
        logger.info(
            "KV blocks: %d on every rank (limited by rank %d; the roomiest has %d)",
            agreement.num_blocks,
            agreement.limiting_rank,
            agreement.largest,
        )
