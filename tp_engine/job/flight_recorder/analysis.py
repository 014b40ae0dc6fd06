"""Explains a flight record in sentences: where each rank stands, and which rank the others wait for.

Positions are ordered, so "has not reached it" has a meaning::

    start-up, by phase  <  step n begun  <  its collectives  <  step n done  <  step n + 1 begun  <  shutdown
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tp_engine.job.faults import PHASES
from tp_engine.job.flight_recorder.record import FlightRecord, RankRecord, StepRecord

ABSENT = "never came"
SILENT_S = 2.5
"""A living rank gives a sign of life every half second; without one for this long it does not run."""

_BEFORE_STEPS, _AFTER_STEPS = -1, 1 << 62
_DONE = 1 << 62


def explain(record: FlightRecord) -> list[str]:
    """Sentences, the most important first: plans that differ, which ranks wait, for which, and the ranks in trouble."""
    everyone = standings(record)
    present = [one for one in everyone if not one.has_left]
    running = [one for one in present if not one.trouble]
    front = max((one.position for one in running), default=None)
    ahead = [one for one in running if one.position == front]
    waiting = [one for one in ahead if one.meets]
    others = [one for one in present if one not in (waiting or ahead)]
    lines = _divergence(record) + _whereabouts(waiting or ahead)
    if waiting and not others:
        return [*lines, "No rank is behind: what does not advance is the operation itself (network, device, driver)."]
    return lines + [_about(one, waiting[0].position if waiting else None) for one in others]


def numbered(ranks: Sequence[int]) -> str:
    """``[1]`` -> ``rank 1``; ``[0, 2, 3]`` -> ``ranks 0, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _whereabouts(ranks: Sequence[Standing]) -> list[str]:
    """Where the ranks are, those at the same place together, in rank order."""
    groups: dict[str, list[Standing]] = defaultdict(list)
    for one in ranks:
        groups[one.place].append(one)
    return [
        f"{numbered([one.rank for one in group]).capitalize()} {'is' if len(group) == 1 else 'are'} {group[0].where}."
        for group in groups.values()
    ]


def _about(one: Standing, awaited_at: tuple[int, int] | None) -> str:
    """Where a rank is, and whether the others wait for it at ``awaited_at``."""
    if one.trouble == ABSENT:
        return f"Rank {one.rank} never came."
    fact = "is"
    if awaited_at is not None:
        fact = "has not reached it: it is" if one.position < awaited_at else "does not go on: it is"
    seen = "" if one.silent_s is None or not one.trouble else f", last sign of life {one.silent_s:.1f} s ago"
    return f"Rank {one.rank} {fact} {one.where}, {one.trouble or 'running'}{seen}."


def _divergence(record: FlightRecord) -> list[str]:
    """For each rank the first step in which it differs from rank 0, and steps that rank 0 never sent."""
    sent = {step.step_id: step for step in record.ranks[0].steps}
    lines = []
    for rank in record.ranks[1:]:
        differences = (_difference(rank.rank, sent[step.step_id], step) for step in rank.steps if step.step_id in sent)
        lines += [line for line in differences if line][:1]
        if sent and rank.steps and rank.steps[-1].step_id > max(sent):
            last = rank.steps[-1].step_id
            lines.append(f"Rank {rank.rank} has step {last}, but step {max(sent)} is the last that rank 0 sent.")
    return lines


def _difference(rank: int, sent: StepRecord, received: StepRecord) -> str:
    """What differs between rank 0's step and that of ``rank``; empty if no difference is known."""
    for what, one, other in (
        ("received another plan", sent.plan_checksum, received.plan_checksum),
        ("made other inputs of the plan", sent.input_digest, received.input_digest),
    ):
        if one and other and one != other:
            return f"Rank {rank} {what} than rank 0 in step {sent.step_id}: {other:#x}, rank 0 has {one:#x}."
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank: its ``position`` in the order above, the same in words (``place``; ``where`` says its age at the time
    of the record too), and what is wrong with it.

    ``trouble`` is empty for a rank that runs; ``silent_s`` is the time since its last sign of life, if any.  ``meets``:
    it waits for the others there.  A rank that failed because of another counts as waiting.
    """

    rank: int
    position: tuple[int, int]
    place: str
    where: str
    silent_s: float | None
    trouble: str
    meets: bool
    has_left: bool


def standings(record: FlightRecord) -> list[Standing]:
    """Return one per rank, in rank order."""
    return [_standing(rank, record) for rank in record.ranks]


def _standing(rank: RankRecord, record: FlightRecord) -> Standing:
    position, place, (event, event_ns) = _place(rank, record.created_ns)
    silent_s, age_s = (_age_s(time_ns, record.written_ns) for time_ns in (rank.heartbeat_ns, event_ns))
    return Standing(
        rank=rank.rank,
        position=position,
        place=place,
        where=place if age_s is None else f"{place}{event} {age_s:.1f} s ago",
        silent_s=silent_s,
        trouble=_trouble(rank, silent_s),
        meets=rank.phase == "group_init" or rank.count > 0
        if position[0] == _BEFORE_STEPS
        else rank.phase == "collective" and position[1] != _DONE,
        has_left=rank.state == "left",
    )


def _place(rank: RankRecord, created_ns: int) -> tuple[tuple[int, int], str, tuple[str, int]]:
    """The position, its words, and the event whose age is shown, with what stands before it."""
    last = rank.steps[-1] if rank.steps else None
    if rank.state in ("stopping", "left") or rank.phase == "shutdown":
        return (_AFTER_STEPS, 0), "in shutdown", ("", 0)
    if rank.step_started > rank.step_done:
        begun_ns = rank.busy_since_ns or (last.started_ns if last else 0)
        in_step = 2 * rank.count + (rank.phase == "sample") if rank.phase in ("collective", "sample") else 0
        phase = f"collective {rank.count}" if rank.phase == "collective" else rank.phase
        return (rank.step_started, in_step), f"in {phase} of step {rank.step_started}", (", begun", begun_ns)
    if rank.step_done:
        done_ns = last.done_ns if last and last.step_id == rank.step_done else 0
        return (rank.step_done, _DONE), f"between steps, step {rank.step_done}", (" done", done_ns)
    if rank.state == "ready":
        return (0, _DONE), "ready, before the first step", ("", 0)
    order = 2 * PHASES.index(rank.phase) if rank.phase in PHASES else -1
    done = " (its own part is done)" if rank.count else ""
    return (_BEFORE_STEPS, order + rank.count), f"in {rank.phase} of the start-up{done}", (", begun", created_ns)


def _trouble(rank: RankRecord, silent_s: float | None) -> str:
    if rank.failed_rank is not None:
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
