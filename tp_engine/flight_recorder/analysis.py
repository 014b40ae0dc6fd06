"""Who was waiting for whom, said in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tp_engine.flight_recorder.record import FlightRecord
from tp_engine.flight_recorder.standing import Standing, standings


def explain(record: FlightRecord) -> list[str]:
    """Sentences, the most telling first: a plan that differs, who waits, for whom, and the ranks in trouble."""
    everyone = standings(record)
    present = [one for one in everyone if not one.has_left]
    running = [one for one in present if not one.trouble]
    front = max((one.position for one in running), default=None)
    ahead = [one for one in running if one.position == front]
    waiting = [one for one in ahead if one.meets]
    others = [one for one in present if one not in (waiting or ahead)]
    lines = _divergence(record) + [_whereabouts(group) for group in _groups(waiting or ahead)]
    if not waiting:
        return lines + [_apart(one) for one in others]
    if not others:
        return [*lines, "No rank is behind: what does not advance is the operation itself (network, device, driver)."]
    return lines + [_awaited(one, waiting[0]) for one in others]


def numbered(ranks: Sequence[int]) -> str:
    """``[1]`` -> ``rank 1``; ``[0, 2, 3]`` -> ``ranks 0, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _groups(ranks: Sequence[Standing]) -> list[list[Standing]]:
    """Ranks at the same place together, in rank order."""
    groups: dict[str, list[Standing]] = defaultdict(list)
    for one in ranks:
        groups[one.place].append(one)
    return list(groups.values())


def _whereabouts(group: Sequence[Standing]) -> str:
    verb = "has been" if len(group) == 1 else "have been"
    since = [one.since_s for one in group if one.since_s is not None]
    duration = f" for {min(since):.1f} s" if since else ""
    return f"{numbered([one.rank for one in group]).capitalize()} {verb} {group[0].place}{duration}."


def _awaited(one: Standing, waiting: Standing) -> str:
    """Why the ranks that wait do so because of this one."""
    fact = "has not reached it: it is" if one.position < waiting.position else "does not go on: it is"
    return f"{numbered([one.rank]).capitalize()} {fact} {one.place}{_condition(one)}."


def _apart(one: Standing) -> str:
    """A rank that nobody waits for in a step."""
    return f"{numbered([one.rank]).capitalize()} is {one.place}{_condition(one)}."


def _condition(one: Standing) -> str:
    text = f", {one.trouble}" if one.trouble else ", running"
    if one.trouble and one.silent_s is not None:
        return f"{text}, last sign of life {one.silent_s:.1f} s ago"
    return text if one.trouble or one.since_s is None else f"{text}, for {one.since_s:.1f} s"


def _divergence(record: FlightRecord) -> list[str]:
    """The first step whose plan differs between rank 0 and another rank, and steps that rank 0 never sent."""
    sent = {step.step_id: step.plan_checksum for step in record.ranks[0].steps if step.plan_checksum}
    lines = []
    for rank in record.ranks[1:]:
        for step in rank.steps:
            expected = sent.get(step.step_id)
            if expected is not None and step.plan_checksum and step.plan_checksum != expected:
                lines.append(
                    f"Rank {rank.rank} received another plan than rank 0 from step {step.step_id} on: rank 0 sent "
                    f"0x{expected:016x}, rank {rank.rank} received 0x{step.plan_checksum:016x}."
                )
                break
        last = rank.steps[-1].step_id if rank.steps else 0
        if sent and last > max(sent):
            lines.append(f"Rank {rank.rank} has step {last}, but step {max(sent)} is the last that rank 0 sent.")
    return lines
