"""The disk tier of one rank: threads that read and write slots of its files, and say how far they are.

::

    plan      disk_reads, disk_writes --> two queues
    reader    waits for the plan's moves, reads, compares checksums --> channel "disk_reads" of the board
    writer    waits for the plan's moves, writes                    --> channel "disk_writes"

Steps never wait for a thread, and neither does the end: a thread that hangs in the kernel is left behind with the
memory that it reads into.  Which slots belong together is the scheduler's business (features/tiers/disk_tier.py).
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.distributed.device_threads import device_thread
from tp_engine.features.tiers.disk_files import SlotFiles
from tp_engine.job.tier_progress import TierProgress
from tp_engine.model_config.kv_layout import DiskCounters
from tp_engine.plan import IntArray
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_END_S = 1.0
_SILENCE_S = 10.0  # between two lines of the log
Ready: TypeAlias = Callable[[], object]
_Work: TypeAlias = tuple[IntArray, int, Ready]
"""Pairs of a plan, the serial of its first write, and what waits for the plan's moves."""


class DiskTierWorker:
    """Reads and writes between ``slots`` (slots, slot_bytes) uint8, memory of the host, and ``files``."""

    def __init__(
        self,
        slots: npt.NDArray[np.uint8],
        files: SlotFiles,
        channels: Mapping[str, TierProgress],
        *,
        first_serial: int,
        device: torch.device,
    ) -> None:
        """``first_serial`` is that of the first write, the same on all ranks; ``device`` is where the moves run."""
        self.counters = DiskCounters()
        self._slots = slots
        self._files = files
        self._next_serial = first_serial
        self._next_word_s = 0.0
        self._reads: SimpleQueue[_Work | None] = SimpleQueue()
        self._writes: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [
            device_thread(device, partial(self._run, queue, body, channels[name]), name=name)
            for name, queue, body in (
                ("disk_reads", self._reads, self._read),
                ("disk_writes", self._writes, self._write),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, reads: IntArray, writes: IntArray, ready: Ready) -> None:
        """Begin a plan's reads and writes; ``ready`` waits for the moves of this plan and those before."""
        if len(reads):
            self._reads.put((np.array(reads), 0, ready))
        if len(writes):
            self._writes.put((np.array(writes), self._next_serial, ready))
            self._next_serial += len(writes)

    def close(self) -> None:
        """Let the threads end after what they have been given; those that hang are left behind, with the files open."""
        self._reads.put(None)
        self._writes.put(None)
        last = threading.Thread(target=self._close_files, name="disk_end", daemon=True)
        last.start()
        last.join(_END_S)
        if last.is_alive():
            logger.warning("the disk tier has not ended within %g s; its last blocks may be missing", _END_S)

    def _close_files(self) -> None:
        """Close the files when both threads have ended, so that their lock does not outlive a slow disk."""
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _run(
        self, queue: SimpleQueue[_Work | None], body: Callable[[int, int, int], bool], progress: TierProgress
    ) -> None:
        while (work := queue.get()) is not None:
            pairs, first_serial, ready = work
            ready()
            for serial, (source, target) in enumerate(pairs.tolist(), first_serial):
                try:
                    is_done = body(source, target, serial)
                except OSError as error:
                    is_done = False
                    self._say(str(error))
                progress.end(1, () if is_done else (progress.num_ended + 1,))

    def _say(self, problem: str) -> None:
        """A line in the log, unless there was one a moment ago."""
        now_s = time.monotonic()
        if now_s >= self._next_word_s:
            self._next_word_s = now_s + _SILENCE_S
            logger.warning("the disk tier of this rank fails: %s", problem)

    def _read(self, slot: int, host: int, _serial: int) -> bool:
        started_s = time.perf_counter()
        view = memoryview(self._slots[host])
        is_right = self._files.read(slot, view)
        self.counters.read_s += time.perf_counter() - started_s
        self.counters.read_bytes += len(view)
        if not is_right:
            self._say("a block is not what was written")
        return is_right

    def _write(self, host: int, slot: int, serial: int) -> bool:
        started_s = time.perf_counter()
        view = memoryview(self._slots[host])
        self._files.write(slot, view, serial)
        self.counters.write_s += time.perf_counter() - started_s
        self.counters.written_bytes += len(view)
        return True
