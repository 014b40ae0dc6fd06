"""Where each rank stands in the program that all ranks run together.

Positions are ordered, so that "has not reached it" means something::

    start-up, by phase  <  step n begun  <  its collectives  <  step n done  <  step n + 1 begun  <  shutdown
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.faults import PHASES
from tp_engine.flight_recorder.record import FlightRecord, RankRecord

ABSENT = "never came"
SILENT_S = 2.5
"""A living rank gives a sign of life every half second; after this long without one it does not run."""

_BEFORE_STEPS, _AFTER_STEPS = -1, 1 << 62
_DONE = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank: its ``position`` in the order above, the same in words (``place``), and what is wrong with it.

    ``when`` is, at the time of the record, the age of what is said, such as ``begun 9.8 s ago``, or empty;
    ``trouble`` is empty for a rank that runs, and ``silent_s`` the time since its last sign of life, if any.  ``meets``
    is true where it waits for the others; a rank that failed because of another was still waiting, and counts as such.
    """

    rank: int
    position: tuple[int, int]
    place: str
    when: str
    silent_s: float | None
    trouble: str
    meets: bool
    has_left: bool


def standings(record: FlightRecord) -> list[Standing]:
    """One per rank, in rank order."""
    return [_standing(rank, record) for rank in record.ranks]


def _standing(rank: RankRecord, record: FlightRecord) -> Standing:
    position, place, (event, event_ns) = _place(rank, record.created_ns)
    silent_s = _age_s(rank.heartbeat_ns, record.written_ns)
    age_s = _age_s(event_ns, record.written_ns)
    return Standing(
        rank=rank.rank,
        position=position,
        place=place,
        when="" if age_s is None else f"{event} {age_s:.1f} s ago",
        silent_s=silent_s,
        trouble=_trouble(rank, silent_s),
        meets=_meets(rank, position),
        has_left=rank.state == "left",
    )


def _place(rank: RankRecord, created_ns: int) -> tuple[tuple[int, int], str, tuple[str, int]]:
    """Position, its words, and the event whose age tells how long."""
    last = rank.steps[-1] if rank.steps else None
    if rank.state in ("stopping", "left") or rank.phase == "shutdown":
        return (_AFTER_STEPS, 0), "in shutdown", ("", 0)
    if rank.step_started > rank.step_done:
        begun_ns = rank.busy_since_ns or (last.started_ns if last else 0)
        return (rank.step_started, _order(rank)), f"{_phase(rank)} of step {rank.step_started}", ("begun", begun_ns)
    if rank.step_done:
        done_ns = last.done_ns if last and last.step_id == rank.step_done else 0
        return (rank.step_done, _DONE), f"between steps, step {rank.step_done}", ("done", done_ns)
    if rank.state == "ready":
        return (0, _DONE), "ready, before the first step", ("", 0)
    order = 2 * PHASES.index(rank.phase) if rank.phase in PHASES else -1
    done = " (its own part is done)" if rank.count else ""
    return (_BEFORE_STEPS, order + rank.count), f"in {rank.phase} of the start-up{done}", ("begun", created_ns)


def _meets(rank: RankRecord, position: tuple[int, int]) -> bool:
    """Whether the rank waits for the others where it is."""
    if position[0] == _BEFORE_STEPS:
        return rank.phase == "group_init" or rank.count > 0
    return rank.phase == "collective" and position[1] != _DONE


def _order(rank: RankRecord) -> int:
    """Position within a step."""
    if rank.phase not in ("collective", "sample"):
        return 0
    return 2 * rank.count + (rank.phase == "sample")


def _phase(rank: RankRecord) -> str:
    return f"in collective {rank.count}" if rank.phase == "collective" else f"in {rank.phase}"


def _trouble(rank: RankRecord, silent_s: float | None) -> str:
    if rank.blamed_rank is not None:
        return ""
    if rank.state == "failed":
        last_line = rank.failure.strip().rpartition("\n")[2]
        return f"failed ({last_line})" if last_line else "failed"
    if rank.state == "left":
        return ""
    if rank.process == "none":
        return ABSENT
    if rank.process == "gone" or rank.exit is not None:
        return f"dead ({rank.exit})" if rank.exit else "dead"
    if rank.process == "stopped":
        return "stopped"
    return "not running" if silent_s is not None and silent_s > SILENT_S else ""


def _age_s(time_ns: int, now_ns: int) -> float | None:
    return max(0, now_ns - time_ns) / 1e9 if time_ns else None
