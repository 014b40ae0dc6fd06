"""What the manager of blocks asks of what lies below the pool: by itself nothing does, and what the pool takes is lost.

A tier gives what it has an id after the blocks of the pool (``PrefixCache.make_room``), so that a hit is a list of
ids, some of which are not in the pool::

    find_hits    reads_all -> may_use -> must_load
    admission    hold (the blocks that a row gets) -> require, if none of them must be loaded
    the pool     give_up (what it has taken) -> require (before a row writes there)
"""

from tp_engine.plan import BoolArray, IntArray
from tp_engine.sched.blocks.block_pool import BlockPool
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import PrefixCache
from tp_engine.sched.sequence import Sequence, Shared


class LowerTier:
    """Nothing below ``pool``; the base of what is."""

    outlives_process = False
    """Whether what is ``published`` may be found by another process: then only names that mean the same there."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool, self._cache = pool, cache

    def reads_all(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence takes hits that are far away, too."""
        return True

    def may_use(self, blocks: BlockIds, *, reads_all: bool) -> BoolArray | None:
        """Return which of ``blocks``, in any shape, a sequence may hit; None: all of them.  Unless it ``reads_all``,
        nothing that is far away."""
        return None

    def is_below(self, blocks: BlockIds) -> BoolArray | None:
        """Return which of ``blocks`` are not in the pool; None: all are there."""
        return None

    def must_load(self, blocks: BlockIds) -> bool:
        """Return whether any of ``blocks`` is not in the pool until a load has gone out."""
        return False

    def hold(self, shared: Shared) -> Shared:
        """Count one more row that holds these blocks; those that are not in the pool get blocks of it."""
        self._pool.share(shared.held)
        return shared

    def give_up(self, lost: BlockIds) -> None:
        """Keep the content of blocks that the pool has taken, or forget it."""
        if len(lost):
            self._cache.evict(lost)

    def require(self, blocks: BlockIds | IntArray) -> None:
        """Let the plan in the making wait until ``blocks``, which it reads or writes, have what they are to have."""

    def published(self, blocks: BlockIds) -> None:
        """Enter blocks of the pool that are cached now; the plan after the one in the making finds them computed."""

    def clear(self) -> None:
        """Forget all content."""

    def check_integrity(self) -> None:
        """Assert that tier, cache and pool agree."""
