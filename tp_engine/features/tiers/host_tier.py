"""The host tier: what the pool gives up stays findable in host memory, and comes back when a sequence needs it.

A slot of the tier has the id ``num_blocks + slot``, and stands in the runs of the prefix cache like a block of the
pool.  Moving a block renames one id in its run, so that a hit is a list of ids, some of which are slots.  Ranks learn
of moves by the plan alone (``STORES`` and ``LOADS``), and report only stores that they may refuse
(``tier_channel``)::

    pool      | used | used | ..... kept, newest .... oldest | tails | free |     taken from the right
                                       |  stores keep this end clean: its blocks have doubles in slots
                                       v
    slots     | doubles ......... | sole copies, newest .... oldest | free |

* A block that the pool takes is renamed to its slot.  If it has none, it is stored in the same plan, which waits for
  the store; beyond ``max_host_moves`` of a plan, or without a slot, it is dropped, and counted.
* While more than ``reserve`` blocks are free, nothing is stored.
* Host blocks that a sequence hits get blocks of the pool at once.  These stand in the runs, so that others share them
  and their load.  The loads wait in a queue until a plan has room for them, and the rows that hold such blocks are
  blocked as long (``Blocked.LOADING``).  The plan after that computes the row, and waits for the load.

Moves run beside forward passes, so no block may be read or written by a row before its last move has ended.  Each block
has the number of the last batch that moves it; a plan in which a row gets the block, or reads it, waits for that batch.
Slots need no such care, as moves are made in the order of the plans, and the stores of a plan before its loads.  So a
slot whose load has not gone out is lent, and becomes free for stores of later plans only.
"""

import numpy as np
import numpy.typing as npt

from tp_engine.features.tiers.disk_tier import NO_LINKS, DiskTierManager, TierLinks
from tp_engine.features.tiers.feature import DISK_READS, DISK_WRITES, LOADS, STORES, WAIT, WAIT_LOAD, TierLimits
from tp_engine.features.tiers.tier_channel import StoreChecks
from tp_engine.features.tiers.tier_slots import NO_SLOT, TierSlots
from tp_engine.plan import NO_PAIRS, BoolArray, IntArray, StepPlan
from tp_engine.sched.blocks.block_manager import BlockManager
from tp_engine.sched.blocks.lower_tier import LowerTier
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds, LruQueue
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.sequence import Sequence, Shared
from tp_engine.system.units import ceil_div

_POOL_SHARE = 32  # what part of the pool is kept free or clean at most
_SLOTS_SHARE = 16  # and how many blocks, compared with the slots


class HostTierManager(LowerTier):
    """What is where, and the moves of the plan in the making."""

    def __init__(
        self, limits: SchedulerLimits, tiers: TierLimits, blocks: BlockManager, links: TierLinks = NO_LINKS
    ) -> None:
        """With ``links.contents`` there is a disk tier below."""
        super().__init__(blocks.pool, blocks.cache)
        self._num_dropped = self._num_stored = self._num_loaded = 0
        cache = self._cache
        cache.make_room(limits.num_blocks + tiers.num_host_slots + tiers.num_disk_slots)
        self._slots = TierSlots(limits.num_blocks, tiers.num_host_slots)
        self.disk = (
            None
            if links.contents is None
            else DiskTierManager(limits, tiers, cache, self._slots, links.reports, links.contents)
        )
        self._checks: StoreChecks | None = None
        if tiers.checks_stores:
            self._checks = StoreChecks(limits.num_blocks, tiers.num_host_slots, links.reports)
        self._max_moves = tiers.max_host_moves
        self._reserve = _reserve(limits, tiers)
        self._num_blocks = limits.num_blocks
        self._pending = LruQueue(limits.num_blocks)  # blocks whose loads have not gone out
        self._urgent = NO_BLOCKS  # those of them that the plan in the making needs
        self._last_batch: npt.NDArray[np.int64] = np.zeros(limits.num_blocks, dtype=np.int64)
        self._next_batch = 1
        self._waited = 0  # all moves up to this batch have ended before any plan in the making runs
        self._wait = 0
        self._stores: dict[int, int] = {}  # of the plan in the making, blocks by slots

    def stats(self) -> dict[str, int]:
        """Return the fields of ``TierStats`` of this tier and the disk's, but for the hits."""
        return ({} if self.disk is None else self.disk.stats()) | {
            "num_host_slots": self._slots.num_slots,
            "num_used_host_slots": self._slots.num_used,
            "num_stored_blocks": self._num_stored,
            "num_loaded_blocks": self._num_loaded,
            "num_dropped_blocks": self._num_dropped,
            "num_refused_blocks": 0 if self._checks is None else self._checks.num_refused,
        }

    @property
    def is_loading(self) -> bool:
        """Whether there are loads that have not gone out."""
        return len(self._pending) > 0

    @property
    def num_moves_left(self) -> int:
        """Stores for which the plan in the making has room."""
        return self._max_moves - len(self._stores)

    @property
    def outlives_process(self) -> bool:  # type: ignore[override]
        return self.disk is not None

    def is_below(self, blocks: BlockIds) -> BoolArray:
        found: BoolArray = blocks >= self._num_blocks
        return found

    def reads_all(self, sequence: Sequence) -> bool:
        wait = WAIT.get(sequence)
        return wait is None or wait.reads_disk

    def may_use(self, blocks: BlockIds, *, reads_all: bool) -> BoolArray | None:
        """As of every tier: not slots that some rank may have refused to fill, and unless a sequence ``reads_all``,
        nothing on disk or being read."""
        if self._checks is not None:
            self._settle(self._checks)
            is_below = self.is_below(blocks)
            is_sure: BoolArray = ~is_below | self._checks.are_sure(np.where(is_below, blocks - self._num_blocks, 0))
            return is_sure
        if self.disk is None or reads_all:
            return None
        return ~self.disk.is_far(blocks.reshape(-1)).reshape(blocks.shape)

    def first_below(self, held: BlockIds, share: int) -> BlockIds:
        """Return the first blocks of ``held`` that are on the host or on disk: no more than fill one ``share``-th of
        the host's slots."""
        return held[self.is_below(held)][: max(1, self._slots.num_slots // share)]

    def _settle(self, checks: StoreChecks) -> None:
        """Take the news of the ranks: what one of them has refused is not on the host."""
        refused = checks.settle()
        if not len(refused):
            return
        blocks, soles = self._slots.drop(refused)
        checks.refused[blocks] = True
        if len(soles):
            self._cache.evict(soles + self._num_blocks)

    def must_load(self, blocks: BlockIds) -> bool:
        is_below = self.is_below(blocks)
        return bool(is_below.any()) or bool(self._pending.holds(blocks[blocks >= 0]).any())

    def hold(self, shared: Shared) -> Shared:
        """Count one more row that holds these blocks.  Those on the host get blocks of the pool, and will be loaded."""
        is_below = self.is_below(shared.held)
        if not is_below.any():
            self._pool.share(shared.held)
            return shared
        table, held = shared.table.copy(), shared.held.copy()  # views of a run, perhaps
        ids = held[is_below]
        slots = ids - self._num_blocks
        self._slots.lend(slots)
        self._pool.share(held[~is_below])  # before the others push them out
        targets, lost = self._pool.allocate(len(ids))
        self.give_up(lost)
        self._pool.mark_full(targets)
        self._rename(ids, targets)
        self._slots.pair(targets, slots)
        self._pending.append(targets)
        table[self.is_below(table)] = targets  # in the order of ``held``
        held[is_below] = targets
        return Shared(table, shared.first, held)

    def give_up(self, lost: BlockIds) -> None:
        """Keep the content of blocks that the pool has taken: full ones become slots, as far as possible."""
        if not len(lost):
            return
        pending = lost[self._pending.holds(lost)]
        self._pending.remove(pending)
        self._slots.give_back(self._slots.slot_of[pending])
        found = self._cache.are_found(lost)
        slots = self._slots.slot_of[lost]
        has_slot = slots != NO_SLOT
        if self._checks is not None:
            is_refused = found & self._checks.refused[lost]
            found &= ~is_refused
            self._num_dropped += int(np.count_nonzero(is_refused))
            self._checks.refused[lost] = False
        self._slots.forget(lost[has_slot & ~found])
        self._slots.part(lost[has_slot & found])
        places = np.flatnonzero(found & ~has_slot)
        if len(places):
            taken = self.take_slots(min(len(places), self.num_moves_left))
            self._num_dropped += len(places) - len(taken)
            dropped, places = np.split(places, [len(places) - len(taken)])  # the last ones stay: others follow them
            slots[places] = taken
            found[dropped] = False
            self._store(lost[places], taken)
        kept, gone = lost[found], lost[~found]
        if len(kept):  # in the order of ``lost``, so that runs still go from their ends
            self._slots.add_soles(slots[found])
            self._rename(kept, slots[found] + self._num_blocks)
        if len(gone):
            self._lose(gone)

    def require(self, blocks: BlockIds | IntArray) -> None:
        """Wait for the moves of ``blocks``; none is pending."""
        if len(blocks):
            self._wait = max(self._wait, int(self._last_batch[blocks].max()))

    def load_now(self, blocks: BlockIds) -> None:
        """Send the loads of ``blocks`` with the plan in the making, which reads them and waits."""
        self._urgent = blocks
        self._wait = max(self._wait, self._next_batch)

    def finish(self, plan: StepPlan) -> StepPlan:
        """Return the plan that has been made, with its moves."""
        if self._pool.num_free < self._reserve:
            self._clean()
        writes = reads = NO_PAIRS
        if self.disk is not None:
            writes = self.disk.writes(self._double)
            reads = self.disk.ordered_reads()
        loads = self._loads(plan.copies[:, 0]) if len(self._pending) else NO_PAIRS
        if not (self._stores or len(loads) or self._wait or len(writes) or len(reads)):
            return plan
        stores = np.array([pair[::-1] for pair in self._stores.items()], dtype=np.int32).reshape(-1, 2)
        self._stores.clear()
        if self._checks is not None and len(stores):
            self._checks.order(stores)
        if len(stores) or len(loads):
            self._next_batch += 1
        wait = min(self._wait, self._next_batch - 1)  # what was to be loaded now may have left since
        if wait <= self._waited:
            wait = 0
        self._waited, self._wait, self._urgent = max(self._waited, wait), 0, NO_BLOCKS
        sections = {STORES: stores, LOADS: loads, DISK_READS: reads, DISK_WRITES: writes}
        found: dict[str, IntArray | int] = {section.name: pairs for section, pairs in sections.items() if len(pairs)}
        return plan.extended(found | ({WAIT_LOAD.name: wait} if wait else {}))

    def published(self, blocks: BlockIds) -> None:
        if self.disk is not None:
            self.disk.published(blocks)

    def clear(self) -> None:
        """Forget all content.  Moves that have gone out may still run."""
        self._slots.give_back(self._slots.slot_of[self._pending.pop(len(self._pending))])
        self._slots.clear()
        if self.disk is not None:
            self.disk.clear()
        if self._checks is not None:
            self._checks.clear()

    def check_integrity(self) -> None:
        """Assert that slots, runs and pool agree."""
        self._slots.check_integrity()
        soles = sorted((self._slots.soles() + self._num_blocks).tolist())
        end = self._num_blocks + self._slots.num_slots
        cached = [block for block in self._cache.cached_blocks() if self._num_blocks <= block < end]
        assert cached == soles, "a slot that only a run knows, or no run"
        paired = np.flatnonzero(self._slots.slot_of != NO_SLOT)
        assert self._pool.contents()[paired].all(), "a block without content has a double"
        assert set(self._pending.order().tolist()) <= set(paired.tolist())
        if self.disk is not None:
            self.disk.check_integrity()

    def _clean(self) -> None:
        """Store the blocks without a double among those that the pool takes next."""
        next_taken = self._pool.next_taken(self._reserve)
        dirty = next_taken[self._slots.slot_of[next_taken] == NO_SLOT]
        if self._checks is not None:
            dirty = dirty[~self._checks.refused[dirty]]
        if not len(dirty):
            return
        self._double(dirty[self._cache.are_found(dirty)])

    def take_slots(self, count: int) -> BlockIds:
        """At most ``count`` slots; what was in them is on disk, or forgotten."""
        if count <= 0:
            return NO_BLOCKS
        slots, lost = self._slots.take(count, self._pool.next_taken(self._reserve))
        if len(lost):
            self._lose(lost + self._num_blocks)
        return slots

    def _rename(self, old: BlockIds, new: BlockIds) -> None:
        self._cache.rename(old, new)
        if self.disk is not None:
            self.disk.moved(old, new)

    def _lose(self, ids: BlockIds) -> None:
        if self.disk is None:
            self._cache.evict(ids)
        else:
            self.disk.lose(ids)

    def _double(self, blocks: BlockIds) -> BlockIds:
        """Store the first of ``blocks``, which have no double, as far as there is room: their slots."""
        slots = self.take_slots(min(len(blocks), self.num_moves_left))
        self._slots.pair(blocks[: len(slots)], slots)
        self._store(blocks[: len(slots)], slots)
        return slots

    def _store(self, blocks: BlockIds, slots: BlockIds) -> None:
        if not len(blocks):
            return
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            self._stores.pop(slot, None)  # of two in one slot, as happens with very few, the later one counts
            self._stores[slot] = block
        self._num_stored += len(blocks)
        self._last_batch[blocks] = self._next_batch
        if self._checks is not None:
            self._checks.begin(slots)

    def _loads(self, copy_sources: IntArray) -> IntArray:
        """The pairs that go out with this plan: at least those that are urgent, and none into ``copy_sources``."""
        count = min(self._max_moves, len(self._pending))
        if len(self._urgent):
            places = np.flatnonzero(np.isin(self._pending.order(), self._urgent))
            count = max(count, int(places[-1]) + 1 if len(places) else 0)
        blocks = self._pending.pop(count)
        if len(copy_sources):
            must_stay = np.isin(blocks, copy_sources)
            self._pending.append(blocks[must_stay])
            blocks = blocks[~must_stay]
        self._last_batch[blocks] = self._next_batch
        slots = self._slots.slot_of[blocks]
        self._slots.give_back(slots)
        self._num_loaded += len(blocks)
        return np.stack((slots, blocks), axis=1).astype(np.int32)


def _reserve(limits: SchedulerLimits, tiers: TierLimits) -> int:
    """Blocks that are kept free or clean: those of a step, if these are few.  Their doubles take slots from others."""
    demand = ceil_div(limits.max_num_batched_tokens, limits.block_size) * limits.num_groups
    return max(1, min(demand, limits.num_blocks // _POOL_SHARE, tiers.num_host_slots // _SLOTS_SHARE))
