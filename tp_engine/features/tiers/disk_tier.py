"""The disk tier: a copy of what is cached, in slots of a file of each rank, that survives the process.

A slot has the id ``num_blocks + num_host_slots + slot``, and stands in the runs of the prefix cache once its content is
nowhere above.  Blocks move between disk and host only::

    pool      | blocks ......... |                       stores, loads: by the plan, at once
    host      | slots ............... |
    disk      | shadows of blocks above ......... | sole copies, newest .... oldest | free |

    written   each block that the cache gets, the longest cached first, while its slot on the host can be spared; before
              them those that the host would lose next.  So what the tiers above give up has a copy, as a rule
    read      when a prompt needs it (``tier_waits``), into a slot on the host, which stands in the runs at once, so
              that others share the read

Plans order reads and writes (``disk_reads``, ``disk_writes``); threads of the ranks make them at their own pace, each
kind in its order, and report (``tier_progress``).  Until then a host slot and a slot on disk are lent to the read or
write, and nothing else is held.  What failed on a rank leaves the cache, and is computed again.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tp_engine.features.tiers.disk_journal import DiskContents, encode_blocks, restore
from tp_engine.features.tiers.feature import TierLimits
from tp_engine.features.tiers.tier_channel import NO_REPORTS, TierBatch, TierChannel, TierReports
from tp_engine.features.tiers.tier_slots import NO_SLOT, TierSlots
from tp_engine.plan import NO_PAIRS, BoolArray, IntArray
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds, LruQueue
from tp_engine.sched.blocks.prefix_cache import PrefixCache
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)

_WRITES_SHARE, _READS_SHARE = 4, 2  # what part of the host's slots writes, or reads, may have at once
_READ_WINDOW = 4  # reads that may be under way, in moves of a plan: some tenths of a second of a disk
_SILENCE_S = 10.0  # between two lines of the log about blocks that failed
_JOURNAL_GROWTH = 4 << 20  # bytes that the journal may grow beyond twice its size before it is written anew


class TierLinks(NamedTuple):
    """What the tiers have of the world: the ranks' reports and, if there is a disk tier, its ``contents``."""

    reports: TierReports = NO_REPORTS
    contents: DiskContents | None = None


NO_LINKS = TierLinks()


class DiskTierManager:
    """What is on disk, and the reads and writes of the plan in the making."""

    def __init__(
        self,
        limits: SchedulerLimits,
        tiers: TierLimits,
        cache: PrefixCache,
        host: TierSlots,
        reports: TierReports,
        contents: DiskContents,
    ) -> None:
        """Enters what ``contents`` has into the cache, which is empty."""
        self.first = limits.num_blocks + tiers.num_host_slots
        self._first_host = limits.num_blocks
        self._cache, self._host = cache, host
        self._journal, self._header, self.clock = contents.sink, contents.header, contents.clock
        self._journal_bytes = self._journal_limit = 0
        self.salt = contents.header.digest
        self._next_serial = contents.first_serial
        self._slots = TierSlots(self.first, tiers.num_disk_slots)
        self._serials = np.zeros(tiers.num_disk_slots, dtype=np.int64)  # of the last writes
        self._most_writes = max(1, min(tiers.max_host_moves, tiers.num_host_slots // _WRITES_SHARE))
        self._most_reads = max(1, min(_READ_WINDOW * tiers.max_host_moves, tiers.num_host_slots // _READS_SHARE))
        self._unwritten = LruQueue(self.first)
        self._fresh = LruQueue(self.first)  # those that are computed by the plan in the making, or later
        self._writes = TierChannel(reports, "disk_writes", self.clock)
        self.reads = TierChannel(reports, "disk_reads", self.clock)
        self._read_of = np.zeros(tiers.num_host_slots, dtype=np.int64)  # number of the last read into each slot
        self._to_read: list[IntArray] = []
        self._is_stuck = False
        self._num_lost, self._next_word_s = 0, 0.0  # not in the log yet
        self._num_void = 0  # writes whose content has been forgotten since
        restored = restore(contents.nodes, cache, self.first, limits.kv_windows.is_full.tolist())
        self._slots.restore(restored.slots)
        self._serials[restored.slots] = restored.serials
        self._rewrite_journal()

    def stats(self) -> dict[str, int]:
        """Return the tier's fields of ``TierStats``, but for the hits."""
        return {
            "num_disk_slots": self._slots.num_slots,
            "num_used_disk_slots": self._slots.num_used,
            "num_disk_written_blocks": self._writes.num_ended - self._writes.num_failed,
            "num_disk_read_blocks": self.reads.num_ended - self.reads.num_failed,
            "num_disk_failed_blocks": self.reads.num_failed + self._writes.num_failed,
        }

    # What the tiers above do.

    def published(self, blocks: BlockIds) -> None:
        """Enter blocks of the pool that are cached now; the plan after the one in the making finds them computed."""
        if len(blocks):
            self._fresh.append(blocks[~(self._fresh.holds(blocks) | self._unwritten.holds(blocks))])
            self._is_stuck = False

    def moved(self, old: BlockIds, new: BlockIds) -> None:
        """Move each id ``old`` to ``new``, which has its content; both are in the pool or on the host."""
        self._slots.move(old, new)
        for queue in (self._unwritten, self._fresh):
            waiting = queue.holds(old)
            queue.remove(old[waiting])
            queue.append(new[waiting])

    def lose(self, ids: BlockIds) -> None:
        """Drop ids that the pool or the host have given up, ends of runs first: what has no copy leaves the cache."""
        copies = self._slots.slot_of[ids]
        has_copy = copies != NO_SLOT
        has_copy[has_copy] = ~self._slots.are_lent(copies[has_copy])
        self.forget(ids[~has_copy])
        kept = ids[has_copy]
        if len(kept):
            found = self._cache.are_found(kept)
            self.forget(kept[~found])
            kept = kept[found]
        if len(kept):
            slots = self._slots.part(kept)
            self._slots.add_soles(slots)
            self._cache.rename(kept, slots + self.first)

    def forget(self, ids: BlockIds) -> None:
        """Forget these ids, in the pool or on the host, whose content leaves the cache."""
        if len(ids):
            for queue in (self._unwritten, self._fresh):
                queue.remove(ids[queue.holds(ids)])
            self._slots.forget(ids)
            self._cache.evict(ids)

    def clear(self) -> None:
        """Forget everything, as the cache is about to; what has been ordered may still run."""
        self._slots.clear()
        for queue in (self._unwritten, self._fresh):
            queue.pop(len(queue))
        self._num_void = self._writes.num_ordered
        self._rewrite_journal()

    # Reads.

    def is_far(self, ids: BlockIds) -> BoolArray:
        """Return which of ``ids`` cannot be shared or loaded yet: on disk, or being read."""
        far: BoolArray = ids >= self.first
        if self.reads.num_open:
            on_host = np.flatnonzero((ids >= self._first_host) & ~far)
            far[on_host] = self._read_of[ids[on_host] - self._first_host] > self.reads.num_ended
        return far

    def fetch(self, ids: BlockIds, take: Callable[[int], BlockIds]) -> int:
        """Order reads of those of ``ids`` that are on disk, as far as there is room; the last read that is for any.
        ``take`` gives at most that many slots of the host.  0 if there is none to wait for."""
        on_host = ids[(ids >= self._first_host) & (ids < self.first)] - self._first_host
        self._host.touch(on_host)
        far = ids[ids >= self.first]
        if len(far) and self.reads.num_open < self._most_reads and not self.reads.is_stalled:
            far = far[: self._most_reads - self.reads.num_open]
            on_host = np.concatenate((on_host, self._begin_reads(far, take(len(far)))))
        return int(self._read_of[on_host].max()) if len(on_host) else 0

    def _begin_reads(self, far: BlockIds, slots: BlockIds) -> BlockIds:
        """Order reads of the first of ``far`` into ``slots``, which have been taken; those that are used."""
        far = far[: len(slots)]
        far = far[self._cache.are_found(far)] if len(far) else far  # not if they lost what they followed
        self._host.add_soles(slots)
        self._host.forget_soles(slots[len(far) :])
        slots, copies = slots[: len(far)], far - self.first
        if len(far):
            self._host.lend(slots)
            self._cache.rename(far, slots + self._first_host)
            self._slots.lend(copies)
            self._slots.pair(slots + self._first_host, copies)
            self.reads.order(slots, copies)
            self._read_of[slots] = np.arange(self.reads.num_ordered - len(far), self.reads.num_ordered) + 1
            self._to_read.append(np.stack((copies, slots), axis=1).astype(np.int32))
        return slots

    # Plans.

    @property
    def is_busy(self) -> bool:
        """Whether anything has been ordered that has not ended."""
        return self.reads.num_open + self._writes.num_open > 0

    @property
    def must_send(self) -> bool:
        """Whether reads wait for a plan."""
        return bool(self._to_read)

    @property
    def has_work(self) -> bool:
        """Whether blocks are to be written and can be, or are being written, to a disk that answers."""
        if self._writes.num_open:
            return not self._writes.is_stalled
        return len(self._unwritten) + len(self._fresh) > 0 and not self._is_stuck

    def rest(self) -> None:
        """Keep an idle engine, which could order nothing, from asking again before there is news."""
        self._is_stuck = True
        if self._journal_bytes > self._journal_limit:
            self._rewrite_journal()

    def settle(self) -> None:
        """Take in what ranks have reported."""
        for batch, has_failed in self.reads.ended():
            self._end(batch, has_failed, "read")
        for batch, has_failed in self._writes.ended():
            self._end(batch, has_failed, "written")
            if batch.first > self._num_void:
                self._journal_bytes += len(batch.records)
                self._journal.append(batch.records)
        if self._journal_bytes > 2 * self._journal_limit:  # without a pause
            self._rewrite_journal()

    def _end(self, batch: TierBatch, has_failed: BoolArray, verb: str) -> None:
        if has_failed.any():
            ids = self._slots.id_of[batch.slots[has_failed]]
            ids = ids[ids >= 0]
            if verb == "read":
                lost = ids[ids >= self._first_host]
                self.forget(lost)
                self._host.forget_soles(lost - self._first_host)
            else:
                self._slots.forget(ids)
            self._num_lost += int(np.count_nonzero(has_failed))
            if self.clock() >= self._next_word_s:
                words = "%d blocks of the disk tier could not be %s: they will be computed again"
                _logger.warning(words, self._num_lost, verb)
                self._num_lost, self._next_word_s = 0, self.clock() + _SILENCE_S
        self._is_stuck = False
        self._slots.give_back(batch.slots)
        self._host.give_back(batch.host)

    def ordered_reads(self) -> IntArray:
        """Return the pairs (slot on disk, slot on the host) that go out with this plan."""
        reads = np.concatenate(self._to_read) if self._to_read else NO_PAIRS
        self._to_read = []
        return reads

    def writes(self, double: Callable[[BlockIds], BlockIds]) -> IntArray:
        """Return the pairs (slot on the host, slot on disk) that go out with this plan.  ``double`` stores blocks of
        the pool, as far as there are slots to spare, and gives their slots on the host."""
        ids = self._next_written()
        self._unwritten.append(self._fresh.pop(len(self._fresh)))
        if not len(ids):
            return NO_PAIRS
        in_pool = ids < self._first_host
        blocks, ids = ids[in_pool], ids[~in_pool]
        host = self._host.slot_of[blocks]
        ids = np.concatenate((ids, blocks[host != NO_SLOT]))
        host = np.concatenate((ids[ids >= self._first_host] - self._first_host, host[host != NO_SLOT]))
        self._host.lend(host)  # before others take these slots
        dirty = blocks[self._host.slot_of[blocks] == NO_SLOT]
        stored = double(dirty[: self._num_to_spare(len(dirty))])
        self._host.lend(stored)
        ids, host = np.concatenate((ids, dirty[: len(stored)])), np.concatenate((host, stored))
        self._unwritten.append(dirty[len(stored) :])
        slots, lost = self._slots.take(len(ids))
        if len(lost):
            self._cache.evict(lost + self.first)
        self._host.give_back(host[len(slots) :])
        return self._write(ids[: len(slots)], host[: len(slots)], slots)

    def _write(self, ids: BlockIds, host: BlockIds, slots: BlockIds) -> IntArray:
        if not len(ids):
            return NO_PAIRS
        serials = np.arange(self._next_serial, self._next_serial + len(ids))
        self._next_serial += len(ids)
        self._serials[slots] = serials
        self._slots.lend(slots)
        self._slots.pair(ids, slots)
        self._writes.order(host, slots, encode_blocks(self._cache, ids, slots, serials))
        return np.stack((host, slots), axis=1).astype(np.int32)

    def _num_to_spare(self, count: int) -> int:
        """Slots of the host, at most ``count``, that can be taken and lose nothing that has no copy."""
        spare = self._host.num_to_spare
        if spare >= count:
            return count
        copies = self._slots.slot_of[self._host.oldest_soles(count - spare) + self._first_host]
        is_safe = copies != NO_SLOT
        is_safe[is_safe] = ~self._slots.are_lent(copies[is_safe])
        return spare + (len(copies) if is_safe.all() else int(np.argmin(is_safe)))

    def _next_written(self) -> BlockIds:
        """Ids without a copy: what the host would lose next, if it is full, then those that are cached for longest."""
        room = self._most_writes - self._writes.num_open
        if room <= 0 or not len(self._unwritten):
            return NO_BLOCKS
        ids = NO_BLOCKS
        if self._host.num_to_spare < room:
            ids = self._host.oldest_soles(room) + self._first_host
            ids = ids[self._unwritten.holds(ids)]
            self._unwritten.remove(ids)
        ids = np.concatenate((ids, self._unwritten.pop(min(room - len(ids), len(self._unwritten)))))
        if not len(ids):
            return ids
        found: BlockIds = ids[self._cache.are_found(ids) & (self._slots.slot_of[ids] == NO_SLOT)]
        return found

    def _rewrite_journal(self) -> None:
        slots = self._slots.contents()
        above = self._slots.id_of[slots]
        ids = np.where(above >= 0, above, slots + self.first)
        data = self._header.encode() + encode_blocks(self._cache, ids, slots, self._serials[slots])
        self._journal.rewrite(data)
        self._journal_bytes, self._journal_limit = len(data), 2 * len(data) + _JOURNAL_GROWTH

    def check_integrity(self) -> None:
        """Assert that slots, runs and the tiers above agree."""
        self._slots.check_integrity()
        cached = [one for one in self._cache.cached_blocks() if one >= self.first]
        assert cached == sorted((self._slots.soles() + self.first).tolist()), "a slot that only a run knows, or no run"
