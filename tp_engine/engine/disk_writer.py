"""What rank 0 does for the disk tier beside its steps: the journal, writes while it is idle, and the last ones.

The journal's thread writes it, so that no step waits for a disk.  A rewrite goes to a new file, which takes the
journal's place when it is whole.  What the process's end cuts off is read as torn at the next start, and dropped
(``sched/tiers/disk_journal.py``).
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tp_engine.plan import StepPlan
from tp_engine.sched.scheduler import Scheduler
from tp_engine.sched.tiers.disk_journal import DiskContents, JournalHeader, read_header, read_nodes
from tp_engine.sched.tiers.tier_waits import DiskWaits
from tp_engine.system.files import sync_folder
from tp_engine.system.log import get_logger
from tp_engine.worker.tiers.disk_start import DiskStart

logger = get_logger(__name__)

_NAME = "journal"
_END_S = 1.0
_FLUSH_S = 10.0
_SLICE_S = 0.0005


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
            logger.warning("the journal of the disk tier can not be written (%s): a later start finds less", error)

    def _append(self, records: bytes) -> None:
        if not self._has_failed:  # what stands behind a torn record is not read
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


class DiskWriter:
    """Plans without rows, which order what no request waits for; ``run`` runs one on all ranks."""

    def __init__(self, scheduler: Scheduler, journal: JournalFile) -> None:
        waits = scheduler.feature(DiskWaits)
        assert waits is not None, "there is no disk tier"
        self._scheduler, self._waits, self._journal = scheduler, waits, journal

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

    def wait(self) -> None:
        """Wait a moment if all requests wait for reads."""
        if self._waits.num_waiting:
            time.sleep(_SLICE_S)

    def close(self) -> None:
        self._journal.close()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
