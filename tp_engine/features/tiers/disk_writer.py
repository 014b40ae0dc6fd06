"""What rank 0 does for the tiers beside its steps: the journal, writes while it is idle, and the last ones.

The journal's thread writes it, so that no step waits for a disk.  A rewrite goes to a new file, which takes the
journal's place when it is whole.  What the process's end cuts off is read as torn at the next start, and dropped
(``disk_journal.py``).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature, EngineHooks
from tp_engine.features.tiers.disk_journal import DiskContents, JournalHeader, read_header, read_nodes
from tp_engine.features.tiers.disk_start import DiskStart
from tp_engine.features.tiers.disk_tier import NO_LINKS, TierLinks
from tp_engine.features.tiers.feature import TierLimits
from tp_engine.features.tiers.options import may_refuse
from tp_engine.features.tiers.ranks import TiersOfRank
from tp_engine.features.tiers.tier_channel import TierReports
from tp_engine.features.tiers.tier_waits import DiskWaits
from tp_engine.ipc.job_board import JobBoard
from tp_engine.job.tier_progress import TIER_CHANNELS, TierProgressReader
from tp_engine.plan import NO_IDS, StepPlan
from tp_engine.sched.scheduler import Scheduler
from tp_engine.system.files import sync_folder
from tp_engine.system.log import get_logger
from tp_engine.worker.worker import StartedRank

logger = get_logger(__name__)

_NAME = "journal"
_END_S = 1.0
_FLUSH_S = 10.0
_SLICE_S = 0.0005
_MOVED_BYTES = 128 << 20  # that a step may move each way between pool and host tier: some milliseconds of a GPU's link


class JournalFile:
    """Writes the journal in ``folder``; after a failure, with a line in the log, what is appended is left out."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._descriptor = -1
        self._has_failed = False
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="disk_journal", daemon=True)

    def append(self, records: bytes) -> None:
        self._queue.put(partial(self._append, records))

    def rewrite(self, data: bytes) -> None:
        """Replace the journal.  The first call, at the start, returns when the new one is on disk: serials continue
        after those that slots have, which may be less than the old journal's if slots have been cleared since, so the
        old one has to be gone before the first write."""
        if self._thread.ident is not None:
            self._queue.put(partial(self._replace, data))
            return
        self._try(partial(self._replace, data))
        if self._has_failed:
            self._path.unlink(missing_ok=True)
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            self._try(act)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._has_failed = True
            logger.warning("the journal of the disk tier cannot be written (%s): a later start finds less", error)

    def _append(self, records: bytes) -> None:
        if not self._has_failed:  # what stands after a torn record is not read
            _write(self._descriptor, records)

    def _replace(self, data: bytes) -> None:
        """Begin a new journal, which takes the old one's place when it is on disk."""
        path = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            _write(descriptor, data)
            os.fsync(descriptor)
            path.replace(self._path)
            sync_folder(path.parent)
        except OSError:
            os.close(descriptor)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._has_failed = descriptor, False


def read_contents(start: DiskStart, *, block_bytes: int, num_groups: int) -> tuple[DiskContents, JournalFile]:
    """Return what the scheduler gets of the disk tier, and what writes its journal from now on.  ``block_bytes`` is the
    size of a block's token ids."""
    try:
        data = (start.path / _NAME).read_bytes()
    except FileNotFoundError:
        data = b""
    header = read_header(data)
    wanted = (block_bytes, num_groups, start.store)
    if header is None or (header.block_bytes, header.num_groups, header.store) != wanted:
        if data and start.serials:
            logger.warning("the disk tier begins empty, because its journal does not belong to its files")
        header, nodes = JournalHeader(*wanted, salt_key=secrets.token_bytes(32)), {}
    else:
        nodes = read_nodes(data, header, start.serials)
    sink = JournalFile(start.path)
    return DiskContents(header, nodes, start.first_serial, sink), sink


def open_tiers(config: EngineConfig) -> TiersOfEngine | None:
    """Make the engine's half of the tiers, if there are any."""
    return TiersOfEngine() if config.kv_offloading_size else None


class TiersOfEngine(EngineFeature):
    """What the tiers have of the world: their sizes, what ranks report of them, and the journal of a disk tier."""

    def __init__(self) -> None:
        self._limits, self._links = TierLimits(), NO_LINKS
        self._journal: JournalFile | None = None

    @property
    def given(self) -> TierLinks:
        return self._links

    def start(self, rank: StartedRank, board: JobBoard) -> None:
        config = rank.effective.config
        words = {name: [slot.channels[name] for slot in board.slots] for name in TIER_CHANNELS}
        reports: TierReports = {name: TierProgressReader(own).poll for name, own in words.items()}
        contents, own = None, rank.features["tiers"]
        assert isinstance(own, TiersOfRank)
        if own.disk is not None:
            contents, self._journal = read_contents(
                own.disk,
                block_bytes=config.block_size * NO_IDS.itemsize,
                num_groups=len(rank.effective.kv_layout.groups),
            )
        self._links = TierLinks(reports, contents)
        self._limits = TierLimits(
            num_host_slots=own.num_slots,
            num_disk_slots=0 if own.disk is None else own.disk.num_slots,
            max_host_moves=max(1, _MOVED_BYTES // rank.effective.kv_shape.block_bytes),
            checks_stores=may_refuse(config.kv_offloading_codec),
        )

    def limits(self) -> TierLimits:
        return self._limits

    def attach(self, hooks: EngineHooks, scheduler: Scheduler) -> None:
        waits = scheduler.feature(DiskWaits)
        if waits is not None:
            writer = DiskWriter(scheduler, waits)
            hooks.idle.append(writer.idle)
            hooks.turn.append(writer.turn)
            hooks.flush.append(writer.flush)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


class DiskWriter:
    """Plans without rows, which order what no request waits for; ``run`` runs one on all ranks."""

    def __init__(self, scheduler: Scheduler, waits: DiskWaits) -> None:
        self._scheduler, self._waits = scheduler, waits

    def turn(self, run: Callable[[StepPlan], None]) -> bool:
        """Order the next writes, if there are any; whether there is more to do."""
        if not self._waits.has_background_work:
            return False
        plan = self._scheduler.schedule_bare(self._waits.finish_bare)
        if plan is not None:
            run(plan)
        return self._waits.has_background_work

    def flush(self, run: Callable[[StepPlan], None]) -> None:
        """Write all that is cached, for some seconds at most, or until the disk does not answer."""
        deadline_s = time.monotonic() + _FLUSH_S
        while self.turn(run):
            if time.monotonic() > deadline_s:
                logger.warning("the disk tier did not get all that is cached within %g s", _FLUSH_S)
                return
            time.sleep(_SLICE_S)

    def idle(self) -> None:
        """Wait a moment if all requests wait for reads."""
        if self._waits.num_waiting:
            time.sleep(_SLICE_S)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
