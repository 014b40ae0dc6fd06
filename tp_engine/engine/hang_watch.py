"""Decides from the board whether the job hangs, and which ranks cause it; touches no process.

::

    stopped   a rank gives no sign of life, and its process uses no CPU time: it is stopped (SIGSTOP).  A rank that
              holds its interpreter for long (an import, a library's call) uses CPU time, or is still starting
    stuck     a step, the start or the end makes no progress: no rank reaches another phase, collective or step, and,
              if CPU time proves life, the ranks that are behind use less than a tenth of one core, and did not wait for
              one either: a busy machine may give them less.  A rank that waits for them looks around at times, and
              waits for a core each time

Time counts from the last progress.  If this process itself was paused (Ctrl-Z of the whole job, a machine
that slept), time counts from the end of the pause.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tp_engine.engine.incident import on_host, where
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import PHASE_WORD, RankSlot, State, process_vitals
from tp_engine.job.progress import RankPhase

_PRESENT: Final = (State.STARTING, State.READY, State.STOPPING)
_GAP_S: Final = 2.0
_SILENT_S: Final = 2.0
_LATE_S: Final = 1.0
_STOPPED: Final = "Tt"
_LIVING_SHARE: Final = 0.1
_PROGRESS_WORDS: Final = (8, PHASE_WORD, 10, 11, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """After ``soft_s`` a hang is logged, after ``hard_s`` it ends the job; the start as a whole has ``startup_s``."""

    soft_s: float
    hard_s: float
    startup_s: float
    cpu_proves_life: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """``culprits``: the ranks that hold up the others, empty if that is not known.  At the age ``hard_s`` the hang ends
    the job."""

    culprits: tuple[int, ...]
    age_s: float
    hard_s: float
    text: str

    @property
    def is_hard(self) -> bool:
        """Whether the hang ends the job."""
        return self.age_s >= self.hard_s


class HangWatch:
    """``rank``'s view of the job; the watchdog calls ``look`` about every half second."""

    def __init__(
        self,
        board: JobBoard,
        rank: int,
        limits: HangLimits,
        *,
        now_ns: int,
        vitals: Callable[[int], tuple[str, int]] = process_vitals,
    ) -> None:
        self._board, self._vitals, self._rank, self._limits = board, vitals, rank, limits
        self._begin(now_ns)

    def look(self, now_ns: int) -> Hang | None:
        """Return the hang that exists now, if any: hard before soft, stopped before stuck."""
        if now_ns - self._looked_ns > _GAP_S * 1e9:
            self._begin(now_ns)
        self._note_progress(now_ns)
        self._note_life(now_ns)
        found = [hang for hang in (self._stopped(now_ns), self._stuck(now_ns)) if hang is not None]
        return next((hang for hang in found if hang.is_hard), found[0] if found else None)

    def acting_rank(self, hang: Hang) -> int:
        """Return the rank of this host that ends the job: the lowest that is present and not to blame, else the
        first."""
        slots = self._board.local_slots
        able = [slot.rank for slot in slots if slot.state in _PRESENT and slot.rank not in hang.culprits]
        return min(able, default=slots[0].rank)

    def _begin(self, now_ns: int) -> None:
        self._looked_ns = self._counting_from_ns = self._progress_ns = now_ns
        self._signature: tuple[int, ...] = ()
        self._lived_ns: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._cpu_ns = self._wanted_cpu_ns()

    def _wanted_cpu_ns(self) -> list[int]:
        """For each rank, the time in which it had a core or waited for one."""
        return [slot.cpu_ns + slot.starved_ns for slot in self._board.slots]

    def _note_progress(self, now_ns: int) -> None:
        slots = self._board.slots
        signature = tuple(slot.words[index] for slot in slots for index in _PROGRESS_WORDS)
        cpu_ns = self._wanted_cpu_ns()
        behind = [rank for rank in self._behind() if slots[rank].pid] or range(len(slots))
        wanted_ns = sum(cpu_ns[rank] - self._cpu_ns[rank] for rank in behind)
        lives = self._limits.cpu_proves_life and wanted_ns > _LIVING_SHARE * (now_ns - self._looked_ns)
        if signature != self._signature or lives or not self._is_busy():
            self._progress_ns = now_ns
        self._signature, self._cpu_ns, self._looked_ns = signature, cpu_ns, now_ns

    def _note_life(self, now_ns: int) -> None:
        """Ask the kernel about processes without a recent beat: a process that uses CPU time lives.  A starting rank
        may also wait for a disk while it holds its interpreter; the limit of the start covers that."""
        far = self._board.far_slots
        for slot in self._board.slots:
            if slot.pid and now_ns - slot.heartbeat_ns > _LATE_S * 1e9:
                state, used = slot.host.vitals if slot in far else self._vitals(slot.pid)
                is_starting = slot.state == State.STARTING and state not in _STOPPED
                if used > self._used.setdefault(slot.rank, used) or is_starting:
                    self._used[slot.rank], self._lived_ns[slot.rank] = used, now_ns

    def _is_starting(self) -> bool:
        return any(slot.state in (State.ABSENT, State.STARTING) for slot in self._board.slots)

    def _is_busy(self) -> bool:
        """Whether a rank is in a step, in the start or in the end, so that progress is expected."""
        if self._is_starting():
            return True
        present = [slot for slot in self._board.slots if slot.state in _PRESENT]
        return any(slot.busy_since_ns or slot.state == State.STOPPING for slot in present)

    def _silence_s(self, slot: RankSlot, now_ns: int) -> float:
        if slot.rank == self._rank or slot.state not in _PRESENT:
            return 0.0
        topology, host = self._board.topology, self._board.topology.host_of(slot.rank)
        if host != self._board.host and not topology.is_leader(slot.rank):
            # Another host's first rank speaks for the others there: if it is silent, they are as they were last seen.
            now_ns = min(now_ns, self._board.slots[topology.leader_of(host)].heartbeat_ns)
        lived_ns = self._lived_ns.get(slot.rank, 0)
        return (now_ns - max(slot.heartbeat_ns, lived_ns, self._counting_from_ns)) / 1e9

    def _stopped(self, now_ns: int) -> Hang | None:
        """Each culprit has been silent for the limit; a rank that a busy machine delays for a moment is not a
        culprit."""
        silence_s = {slot.rank: self._silence_s(slot, now_ns) for slot in self._board.slots}
        age_s = max(silence_s.values())
        if age_s < self._limits.soft_s:
            return None
        limit_s = self._limits.hard_s if age_s >= self._limits.hard_s else self._limits.soft_s
        culprits = tuple(rank for rank, seconds in silence_s.items() if seconds >= limit_s)
        return self._hang(culprits, age_s, self._limits.hard_s, "stopped, without a sign of life")

    def _stuck(self, now_ns: int) -> Hang | None:
        limits, age_s = self._limits, (now_ns - self._progress_ns) / 1e9
        starting = self._is_starting()
        soft_s, hard_s = (limits.startup_s / 2, limits.startup_s) if starting else (limits.soft_s, limits.hard_s)
        if age_s < soft_s:
            return None
        # A rank that a busy machine delays for a moment does not explain the whole time.
        silent_s = max(_SILENT_S, age_s / 2)
        silent = tuple(slot.rank for slot in self._board.slots if self._silence_s(slot, now_ns) > silent_s)
        if silent:
            return self._hang(silent, age_s, hard_s, "stopped, and the job has not got ahead")
        return self._hang(self._behind(), age_s, hard_s, "stuck: the job has not got ahead")

    def _behind(self) -> tuple[int, ...]:
        """The ranks that the others wait for; none if all are equally far."""
        slots = [slot for slot in self._board.slots if slot.state not in (State.LEFT, State.FAILED)]
        if stopping := tuple(slot.rank for slot in slots if slot.state == State.STOPPING):
            return stopping
        place = {slot.rank: _place(slot) for slot in slots}
        least, most = min(place.values(), default=()), max(place.values(), default=())
        return tuple(rank for rank in place if place[rank] == least) if least < most else ()

    def _hang(self, culprits: tuple[int, ...], age_s: float, hard_s: float, what: str) -> Hang:
        slots = self._board.slots
        if culprits:
            names = "; ".join(
                f"rank {rank} is {on_host(self._board, slots[rank])}{where(slots[rank])}" for rank in culprits
            )
        else:
            names = f"all ranks are {where(slots[self._rank])}"
        return Hang(culprits=culprits, age_s=age_s, hard_s=hard_s, text=f"{what} for {age_s:.1f} s: {names}")


def _place(slot: RankSlot) -> tuple[int, ...]:
    """How far a rank is; one that sleeps in a phase is behind one that waits in that phase's next collective."""
    if slot.state in (State.ABSENT, State.STARTING):
        return (slot.state, slot.phase, slot.count)
    if slot.phase >= RankPhase.STEP_BEGIN and slot.busy_since_ns:
        return (State.READY, slot.step_started, slot.count)
    return (State.READY, slot.step_started + 1, 0)
