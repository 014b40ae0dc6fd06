"""Where each rank stands in the program that all ranks run together.

Positions are ordered, so that "has not reached it" means something::

    start-up, by phase  <  step n begun  <  step n in its collectives  <  step n done  <  step n + 1 begun  <  shutdown
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.flight_recorder.record import FlightRecord, RankRecord

START_PHASES = ("import", "group_init", "load", "profile", "agree", "ready")
MEETING_PHASES = frozenset({"group_init", "agree", "ready", "collective"})
SILENT_S = 2.5
"""A living rank gives a sign of life every half second; after this long without one it does not run."""

_BEGUN, _MEETING, _DONE = range(3)
_BEFORE_STEPS, _AFTER_STEPS = -1, 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank: its ``position`` in the order above, in words (``place``), since when, and what is wrong with it.

    ``trouble`` is empty for a rank that runs; ``since_s`` and ``silent_s`` are ages at the time of the record, None
    where they are not known.
    """

    rank: int
    position: tuple[int, int]
    place: str
    since_s: float | None
    silent_s: float | None
    trouble: str
    meets: bool

    @property
    def has_left(self) -> bool:
        """Whether the rank ended as it should, and can be waited for by nobody."""
        return self.position[0] == _AFTER_STEPS and not self.trouble


def standings(record: FlightRecord) -> list[Standing]:
    """One per rank, in rank order."""
    return [_standing(rank, record.written_ns) for rank in record.ranks]


def _standing(rank: RankRecord, now_ns: int) -> Standing:
    position, place, since_ns = _place(rank)
    silent_s = _age_s(rank.heartbeat_ns, now_ns)
    return Standing(
        rank=rank.rank,
        position=position,
        place=place,
        since_s=_age_s(since_ns, now_ns),
        silent_s=silent_s,
        trouble=_trouble(rank, silent_s),
        meets=rank.phase in MEETING_PHASES and position[1] != _DONE,
    )


def _place(rank: RankRecord) -> tuple[tuple[int, int], str, int]:
    """Position, its words, and when the rank came there."""
    last = rank.steps[-1] if rank.steps else None
    if rank.state in ("left", "stopping") or rank.phase == "shutdown":
        return (_AFTER_STEPS, 0), "in shutdown", rank.phase_entered_ns
    if rank.step_started > rank.step_done:
        since_ns = rank.phase_entered_ns or (last.started_ns if last else 0)
        order = _BEGUN if rank.phase == "step_begin" else _MEETING
        return (rank.step_started, order), f"in {rank.phase} of step {rank.step_started}", since_ns
    if rank.step_done or rank.state == "ready":
        return (rank.step_done, _DONE), _between(rank), last.done_ns if last else rank.phase_entered_ns
    order = START_PHASES.index(rank.phase) if rank.phase in START_PHASES else -1
    return (_BEFORE_STEPS, order), f"in {rank.phase} while starting", rank.phase_entered_ns


def _between(rank: RankRecord) -> str:
    return f"between steps, with step {rank.step_done} done" if rank.step_done else "ready, before the first step"


def _trouble(rank: RankRecord, silent_s: float | None) -> str:
    if rank.state == "failed":
        last_line = rank.failure.strip().rpartition("\n")[2]
        return f"failed ({last_line})" if last_line else "failed"
    if rank.state == "left":
        return ""
    if rank.process == "gone" or rank.exit is not None:
        return f"dead ({rank.exit})" if rank.exit else "dead"
    if rank.process == "stopped":
        return "stopped"
    if silent_s is not None and silent_s > SILENT_S:
        return "not running"
    return ""


def _age_s(time_ns: int, now_ns: int) -> float | None:
    return max(0, now_ns - time_ns) / 1e9 if time_ns else None
