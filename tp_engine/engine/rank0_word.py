"""What rank 0 of a torchrun job decides before any engine exists: whether the other ranks are needed at all."""

from __future__ import annotations

from tp_engine import env
from tp_engine.ranks.groups import launched_store

_KEY = "engine is needed"
_CONNECT_S = 60.0
_DECISION_LIMIT_S = 24 * 3600.0


def tell_ranks(is_needed: bool) -> None:
    """Rank 0: let the others go on, or go home; nothing happens without others.  Call it once per ``ask_rank0``."""
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        launched_store(timeout_s=_CONNECT_S).set(_KEY, "yes" if is_needed else "no")


def ask_rank0() -> bool:
    """Another rank: wait for rank 0's word, as long as that takes; torchrun ends the job if rank 0 fails."""
    return bytes(launched_store(timeout_s=_DECISION_LIMIT_S).get(_KEY)) == b"yes"
