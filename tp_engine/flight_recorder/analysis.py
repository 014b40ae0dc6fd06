"""Who was waiting for whom, said in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tp_engine.flight_recorder.record import FlightRecord, StepRecord
from tp_engine.flight_recorder.standing import ABSENT, Standing, standings


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
    verb = "is" if len(group) == 1 else "are"
    return f"{numbered([one.rank for one in group]).capitalize()} {verb} {_where(group[0])}."


def _awaited(one: Standing, waiting: Standing) -> str:
    """Why the ranks that wait do so because of this one."""
    if one.trouble == ABSENT:
        return _apart(one)
    fact = "has not reached it: it is" if one.position < waiting.position else "does not go on: it is"
    return f"Rank {one.rank} {fact} {_where(one)}{_condition(one)}."


def _apart(one: Standing) -> str:
    """A rank that nobody waits for in a step."""
    if one.trouble == ABSENT:
        return f"Rank {one.rank} never came."
    return f"Rank {one.rank} is {_where(one)}{_condition(one)}."


def _where(one: Standing) -> str:
    separator = " " if one.when.startswith("done") else ", "
    return one.place + separator + one.when if one.when else one.place


def _condition(one: Standing) -> str:
    if not one.trouble:
        return ", running"
    return f", {one.trouble}" + ("" if one.silent_s is None else f", last sign of life {one.silent_s:.1f} s ago")


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
    """What differs between rank 0's step and that of ``rank``; empty if nothing does, as far as is known."""
    for what, one, other in (
        ("received another plan", sent.plan_checksum, received.plan_checksum),
        ("made other inputs of the plan", sent.input_digest, received.input_digest),
    ):
        if one and other and one != other:
            return f"Rank {rank} {what} than rank 0 in step {sent.step_id}: {other:#x}, rank 0 has {one:#x}."
    return ""
