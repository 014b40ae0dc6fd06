"""The watchdog thread of each rank: it shows signs of life and watches the others, so that no rank waits for ever.

It sleeps in the kernel until another rank's process ends, or for half a second.

::

    a rank died or failed   log which rank, where, and its traceback; give this rank's main thread a moment to fail by
                            itself (gloo raises when a peer's sockets close); then end:
                              a process of the engine alone   exit code 1
                              a script under torchrun (LLM)   kill the other ranks, abort the collectives: what waits
                                                              in rank 0's thread raises, which asks ``check``
    hung, soft limit        every rank logs the stacks of all its threads, once
    hung, hard limit        the lowest rank of each host that is not a culprit ends the job: where it may, it kills the
                            culprits of its host (a stopped process cannot end by itself), then as above
"""

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from tp_engine.engine.hang_watch import Hang, HangLimits, HangWatch
from tp_engine.engine.incident import Incident, find_incident, where
from tp_engine.engine.peers import Peers
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.pulse import Pulse
from tp_engine.ipc.rank_slot import Ended, State
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

TICK_S: Final = 0.5
_SETTLE_S: Final = 0.2
_EXIT_S: Final = 1.5
_GRACE_S: Final = 2.0
_FOLLOWER_GRACE_S: Final = 3.0
_OWN_FAILURE_GRACE_S: Final = 5.0
_LAST_RESORT_S: Final = 5.0


class Watchdog:
    """``rank``'s watchdog over ``board``.

    ``ends_process``: this process belongs to the engine alone and may be ended.  ``may_kill``: this rank may kill other
    ranks, as their parent, or because torchrun is the parent of all.  ``exit_code`` tells how a child ended.
    ``on_incident`` and ``abort`` are called once, from the watchdog's thread.  ``tell_hosts`` sends this rank's
    board to the other hosts.
    """

    def __init__(self, board: JobBoard, rank: int, limits: HangLimits, *, ends_process: bool, may_kill: bool) -> None:
        self.incident: Incident | None = None
        self.hang: Hang | None = None
        self.peers = Peers(board, rank)
        self.pulse: Pulse | None = None
        self._forget_owner()
        self._board = board
        self._slot = board.slots[rank]
        self._ends_process, self._may_kill = ends_process, may_kill
        self._hangs = HangWatch(board, rank, limits, now_ns=time.monotonic_ns())
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"watchdog of rank {rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise ``RankError`` for the rank that has died or failed, if one has."""
        incident = self._find()
        if incident is not None:
            raise incident.error()

    def adopt(self, rank: int, pid: int) -> None:
        """Watch a child that this process has just started, before it registers on the board."""
        with self._lock:
            self.peers.adopt(rank, pid)
        os.eventfd_write(self._wake, 1)

    def missing(self) -> list[int]:
        """Return the ranks that have neither left nor ended."""
        with self._lock:
            self.peers.refresh()
            return self.peers.missing()

    def end_missing(self, why: str) -> None:
        """Report the ranks that have not left as the incident, and kill them if this rank may."""
        with self._lock:
            missing = self.peers.missing()
            if missing and self.incident is None:
                self._report(Incident(missing[0], f"{why}: {where(self._board.slots[missing[0]])}"))
            if self._may_kill:
                self.peers.kill(missing)

    def note_ends(self) -> None:
        """Note on the board which processes of this host have ended, for other hosts."""
        with self._lock:
            if not self._over.is_set():
                self.peers.refresh()
                self._note_ends()

    def wake(self) -> None:
        """Look around now; from any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, not the process.  Safe to call twice."""
        if self._over.is_set():
            return
        self._over.set()
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self.peers.close()
            os.close(self._wake)
        self._forget_owner()

    def _forget_owner(self) -> None:
        """Drop the callbacks: they refer to the job, which refers to this object."""
        self.exit_code: Callable[[int], int | None] = lambda rank: None
        self.tell_hosts: Callable[[], None] = lambda: None
        self.on_incident: Callable[[Incident], None] = lambda incident: None
        self.abort: Callable[[], None] = lambda: None

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._wait()
                self._beat()
                self._turn()
        except Exception:
            logger.exception("the watchdog failed")
            raise

    def _beat(self) -> None:
        self._slot.beat()
        if self.pulse is not None:
            self.pulse.beat(hangs=self.hang is not None or self.incident is not None)

    def _wait(self) -> None:
        with self._lock:
            descriptors = [] if self._over.is_set() else self.peers.refresh()
        poll = select.poll()
        for descriptor in (self._wake, *descriptors):
            poll.register(descriptor, select.POLLIN)
        poll.poll(TICK_S * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _turn(self) -> None:
        if self._over.is_set():
            return
        incident = self._find()
        if incident is None and self._slot.state == State.FAILED and self._ends_process:
            self._end_after(_GRACE_S)
        elif incident is None:
            incident = self._look_for_hang()
        if incident is not None:
            self._end_job(incident)

    def _find(self) -> Incident | None:
        """The incident, once there is one.  The first thing noticed may be a consequence, and a rank that has failed
        takes a moment to end: so look twice."""
        with self._lock:
            if self.incident is None and not self._over.is_set() and (seen := self._look_around()) is not None:
                time.sleep(_SETTLE_S)
                deadline_s = time.monotonic() + _EXIT_S
                while seen.rank not in self.peers.gone() and time.monotonic() < deadline_s:
                    time.sleep(_SETTLE_S)
                self._report(self._look_around())
            return self.incident

    def _look_around(self) -> Incident | None:
        self.peers.refresh()
        self._note_ends()
        return find_incident(self._board, self._slot.rank, self.peers.gone(), self.exit_code)

    def _note_ends(self) -> None:
        """A host's first rank tells the other hosts which processes have ended here; they cannot see it."""
        topology = self._board.topology
        if topology.num_hosts == 1 or not topology.is_leader(self._slot.rank):
            return
        gone = self.peers.gone()
        for slot in self._board.local_slots:
            if slot.rank in gone and not slot.host.ended:
                slot.host.note_ended(Ended.PROCESS, time.monotonic_ns())
                self.tell_hosts()

    def _report(self, incident: Incident | None) -> None:
        if incident is None:
            return
        self.incident = incident
        details = f"\nit reported:\n{incident.details}" if incident.details else ""
        logger.error("rank %d: %s%s", incident.rank, incident.message, details)
        with contextlib.suppress(Exception):
            self.on_incident(incident)

    def _look_for_hang(self) -> Incident | None:
        hang = self._hangs.look(time.monotonic_ns())
        if hang is not None and self.hang is None:
            logger.warning("the job seems to hang: %s\n%s", hang.text, _stacks())
        self.hang = hang
        if hang is None or not hang.is_hard or (self._board.world_size == 1 and not self._ends_process):
            return None  # no rank waits for a user's own process of one rank: it may be in a debugger
        is_acting = self._hangs.acting_rank(hang) == self._slot.rank
        if not is_acting and hang.age_s < hang.hard_s + _LAST_RESORT_S:
            return None
        with self._lock:
            if self.incident is None:
                self._report(Incident(hang.culprits[0] if hang.culprits else self._slot.rank, hang.text))
            if self._may_kill and is_acting:
                self.peers.kill(hang.culprits)
        return self.incident

    def _end_job(self, incident: Incident) -> None:
        grace_s = _GRACE_S if self._slot.rank == 0 else _FOLLOWER_GRACE_S
        if self._ends_process:
            self._end_after(grace_s)
        elif not self._over.wait(grace_s):
            if self._may_kill:
                self.peers.kill_all()
            self.abort()
            while not self._over.wait(TICK_S):
                self._beat()

    def _end_after(self, grace_s: float) -> None:
        """End this process after ``grace_s``, unless its main thread ends it before."""
        if self._over.wait(grace_s):
            return
        if self._slot.state == State.FAILED and self._over.wait(_OWN_FAILURE_GRACE_S):
            return
        incident = self.incident
        if incident is not None:
            self._slot.fail(f"ended because of rank {incident.rank}: {incident.message}", failed_rank=incident.rank)
            self.tell_hosts()
            if self._may_kill and self._board.topology.is_leader(self._slot.rank):
                self.peers.kill_all()
        logger.error("the main thread did not end by itself: exit code 1\n%s", _stacks())
        sys.stderr.flush()
        os._exit(1)


def _stacks() -> str:
    """The stacks of all threads of this process except the caller's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "".join(texts)
