"""This rank's membership in a job: its slot of the board, its phases, its watchdog.

::

    rank 0                                      another rank
      Job(a new board)                            Job(the board at its address)
      phases of the start       <-- all see -->   phases of the start
      ready                                       ready
      leave (after the stop plan)                 leave (when the stop plan has come)
      an error: report, record_failure                     an error: report
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from time import monotonic, sleep

from tp_engine.config import EngineConfig
from tp_engine.engine.hang_watch import HangLimits
from tp_engine.engine.host_link import HostLinks
from tp_engine.engine.incident import FlightRecorder, Incident, about_gpu
from tp_engine.engine.processes import ChildRanks
from tp_engine.engine.watchdog import Watchdog
from tp_engine.errors import MemoryBudgetError, PlanError, RankError, WeightError
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.pulse import Pulse
from tp_engine.ipc.rank_slot import COLLECTIVE_WORD, PHASE_WORD, State
from tp_engine.job.progress import RankProgress
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_DYING_S = 2.0
_FOLLOWER_DYING_S = 0.5
_FAREWELL_S = 8.0
_OWN_FAULT = (WeightError, PlanError)


class Job:
    """``rank``'s membership on its host's ``board``, ended by ``close``; ``progress`` takes the rank's phases, and the
    watchdog keeps ``pulse`` beating.  ``ends_process``: this process belongs to the engine alone.  ``same_parent``:
    torchrun started all ranks, so each may end the others; otherwise rank 0 started them, and only rank 0 may."""

    def __init__(
        self,
        board: JobBoard,
        progress: RankProgress,
        config: EngineConfig,
        rank: int,
        *,
        ends_process: bool,
        same_parent: bool,
        pulse: Pulse | None = None,
    ) -> None:
        self.board, self.rank, self.owns_process = board, rank, ends_process
        self.slot = board.slots[rank]
        self.progress = progress
        progress.show_on(self.slot.words, PHASE_WORD, COLLECTIVE_WORD)
        self.slot.register()
        limits = HangLimits(
            soft_s=config.watchdog_warn_s,
            hard_s=config.watchdog_timeout_s,
            startup_s=config.startup_timeout_s,
            cpu_proves_life=config.device == "cpu",
        )
        self.watchdog = Watchdog(board, rank, limits, ends_process=ends_process, may_kill=same_parent or rank == 0)
        self.links: HostLinks | None = None
        self._recorder = FlightRecorder(board, config, writer=f"rank {rank}")
        self.watchdog.on_incident = self._record
        self.watchdog.pulse = pulse
        self.watchdog.peers.marks = env.launch_marks() if same_parent else {}
        self.watchdog.start()

    def adopt(self, children: ChildRanks) -> None:
        """Watch the ranks that this process has started."""

        def exit_code(rank: int) -> int | None:
            code = children.exit_code(rank)
            if code is not None:
                self.board.slots[rank].note_exit(code)
            return code

        self.watchdog.exit_code = exit_code
        for rank, pid in children.pids.items():
            self.watchdog.adopt(rank, pid)

    def connect(self) -> HostLinks:
        """Connect this first rank with other hosts, to keep their boards alike; ``close`` ends the connections."""
        if self.links is None:
            self.links = HostLinks(self.board, self.rank)
            self.links.wake = self.watchdog.wake
            self.watchdog.tell_hosts = self.links.tell
        return self.links

    @property
    def has_failed(self) -> bool:
        """Whether this rank has failed, or has seen another one fail."""
        return self.slot.state == State.FAILED or self.watchdog.incident is not None

    def check(self) -> None:
        """Raise ``RankError`` for the rank that has died, failed or hung, if one has."""
        self.watchdog.check()

    def alive(self, _rank: int = 0) -> bool:
        """Return True; raises ``RankError`` for the rank that ended the job.  Waits on another rank call it."""
        self.check()
        return True

    def wait_step(self, step_id: int, *, timeout_s: float) -> None:
        """Wait until every rank has ended the step; ``RankError`` if a rank fails, ``TimeoutError`` if one is late."""
        deadline_s = monotonic() + timeout_s
        while late := [slot.rank for slot in self.board.slots if slot.step_done < step_id]:
            self.check()
            if monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s for rank {late[0]} to end step {step_id}")
            sleep(0.001)

    def ready(self) -> None:
        """Put on the board that this rank is ready."""
        self.slot.state = State.READY

    def stopping(self) -> None:
        """Put on the board that the requested stop has begun."""
        if self.slot.state != State.FAILED:
            self.slot.state = State.STOPPING

    def on_exit(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Write an error to the board before any clean-up (``ExitStack.push``), so that it precedes its
        consequences."""
        if error is not None:
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Write ``error`` with its traceback to the board, where all ranks see it."""
        culprit = error.rank if isinstance(error, (RankError, MemoryBudgetError)) else None
        failed = None if culprit == self.rank else culprit
        is_asked_for = not isinstance(error, Exception)  # a signal, or an exit
        text = f"it was told to stop ({type(error).__name__})" if is_asked_for else traceback.format_exception(error)
        self.watchdog.note_ends()  # torchrun stops a rank because of one that has ended: that one is the cause
        self.slot.fail("".join(text), failed_rank=failed)
        if self.rank == 0 and failed is None and (gpu := about_gpu(self.slot)):  # others are told of by the incident
            logger.error("rank 0 failed%s", gpu)
        self.watchdog.tell_hosts()

    def record_failure(self, error: BaseException) -> None:
        """Raise ``RankError`` if another rank caused this rank's ``error``; return if it is this rank's own.  A
        collective fails as soon as a dying peer's sockets close, shortly before its process has ended."""
        self.report(error)
        if not isinstance(error, Exception):  # a requested stop: no rank caused it
            return
        if isinstance(error, MemoryBudgetError):  # the ranks have agreed: all raise it, and it names the rank
            self._record_own(error, self.rank if error.rank is None else error.rank)
            return
        may_follow = isinstance(error, RuntimeError) and not isinstance(error, _OWN_FAULT)
        if isinstance(error, RankError) and self.watchdog.incident is not None:
            return
        patience_s = _DYING_S if self.rank == 0 else _FOLLOWER_DYING_S
        deadline_s = monotonic() + (patience_s if may_follow else 0.0)
        while True:
            try:
                self.check()
            except RankError as cause:
                raise cause from error
            if monotonic() > deadline_s:
                break
            sleep(0.01)
        self._record_own(error, error.rank if isinstance(error, RankError) else self.rank)

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Report an error within, and raise it as ``RankError`` if another rank caused it."""
        try:
            yield
        except BaseException as error:
            self.record_failure(error)
            raise

    def leave(self) -> None:
        """Leave in order: mark this rank as left, and wait until the others have left.  ``RankError`` for a rank that
        failed meanwhile or has not left after some seconds.  Such a rank hangs; it is killed where this rank may,
        because torchrun, as the parent of all ranks, would not do it."""
        if self.slot.state == State.FAILED:
            return
        self.slot.state = State.LEFT
        self.watchdog.tell_hosts()
        deadline_s = monotonic() + _FAREWELL_S
        while (missing := self.watchdog.missing()) and monotonic() < deadline_s:
            self.check()
            sleep(0.01)
        if missing:
            self.watchdog.end_missing(f"did not leave within {_FAREWELL_S:g} s")
        self.check()

    def close(self) -> None:
        """Stop watching.  A job that did not leave counts as failed."""
        if self.slot.state not in (State.LEFT, State.FAILED):
            self.slot.fail("the engine was closed before it was ready")
        if self.links is not None:
            self.links.stop()
        self.watchdog.stop()
        self.board.stop_sharing()

    def _record_own(self, error: Exception, culprit: int) -> None:
        if self.rank == 0:
            self._recorder.write(f"rank {self.rank}: {type(error).__name__}: {error}", culprit)

    def _record(self, incident: Incident) -> None:
        """Rank 0 writes the flight record; if rank 0 is the cause and wrote none, the first other rank of each host."""
        first = self.board.local_slots[0].rank
        if incident.rank != 0:
            is_writing = self.rank == 0
        elif self.board.slots[0].state == State.FAILED and self.board.slots[0].failed_rank is None:
            is_writing = False
        else:
            is_writing = self.rank == (1 if first == 0 else first)
        if is_writing:
            self._recorder.write(str(incident.error()), incident.rank)
