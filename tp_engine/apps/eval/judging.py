"""From answers to verdicts: shares with their intervals, thresholds, and the same questions in an earlier run.

A threshold passes where the share of right answers is at least the threshold.  It fails where even the upper bound of
the share's interval is below: then chance does not explain it.  In between the questions are too few to tell, and the
verdict is undecided.  Beside an earlier run, a task fails where more answers became wrong than right and McNemar's test
finds that split unlikely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tp_engine.apps.gates.recorded import read_recorded
from tp_engine.apps.gates.report import GateLine, GateVerdict
from tp_engine.apps.gates.statistics import LEVEL, Interval, paired_p, share_interval
from tp_engine.system.units import MIB

_MOST_BYTES = 256 * MIB


class EvalOutcome(msgspec.Struct, frozen=True):
    """One question's answer, and whether it is right."""

    id: str
    right: bool
    answer: str = ""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """All outcomes of a task.  ``digest`` names its questions, ``settings`` what else decides how they were asked."""

    name: str
    digest: str
    settings: dict[str, Any]
    outcomes: list[EvalOutcome]
    seconds: float = 0.0

    @property
    def num_right(self) -> int:
        """How many answers are right."""
        return sum(one.right for one in self.outcomes)

    @property
    def interval(self) -> Interval:
        """The share of right answers."""
        return share_interval(self.num_right, len(self.outcomes))

    def described(self) -> str:
        """Return the share in words."""
        share, low, high = (100 * bound for bound in self.interval)
        return f"{self.num_right} of {len(self.outcomes)} right, {share:.1f} % ({low:.1f} to {high:.1f} %)"


class _Recorded(msgspec.Struct, frozen=True):
    subject: str
    tasks: list[TaskResult]


@dataclass(frozen=True)
class Reference:
    """The tasks of an earlier run, from the file that ``--record`` wrote."""

    path: str
    subject: str
    tasks: Mapping[str, TaskResult]

    @staticmethod
    def read(path: str) -> Reference:
        """Return the run in ``path``; raises ``ConfigError``."""
        found = read_recorded(path, _Recorded, max_bytes=_MOST_BYTES)
        return Reference(path, found.subject, {task.name: task for task in found.tasks})


def share_line(result: TaskResult, threshold: float | None) -> GateLine:
    """The line of a task's share, beside its threshold if there is one."""
    share, low, high = result.interval
    numbers = {"right": result.num_right, "asked": len(result.outcomes), "share": share, "low": low, "high": high}
    common: dict[str, Any] = {"name": result.name, "measured": result.described(), "seconds": result.seconds}
    if threshold is None:
        return GateLine(verdict=GateVerdict.MEASURED, numbers=numbers, **common)
    common |= {"numbers": numbers | {"threshold": threshold}, "rule": f"at least {100 * threshold:g} %"}
    if share >= threshold:
        return GateLine(verdict=GateVerdict.PASSED, **common)
    if high < threshold:
        remedy = f"the share is below, and chance does not explain it ({LEVEL:.0%} interval)"
        return GateLine(verdict=GateVerdict.FAILED, remedy=remedy, **common)
    needed = questions_needed(share, threshold)
    remedy = f"the share is below, but {len(result.outcomes)} questions are too few to tell it from the threshold"
    if needed is not None:
        remedy += f"; about {needed:,} would do"
    return GateLine(verdict=GateVerdict.UNDECIDED, remedy=remedy, **common)


def questions_needed(share: float, threshold: float) -> int | None:
    """About how many questions put the threshold outside of the interval, if the share stays; None if none do."""
    return next(
        (
            num
            for num in (10**digits * lead for digits in range(1, 7) for lead in (1, 2, 5))
            if share_interval(math.floor(share * num), num).high < threshold
        ),
        None,
    )


def reference_line(result: TaskResult, reference: Reference, *, force: bool) -> GateLine:
    """The line of a task beside the same questions in an earlier run."""
    name, before = f"{result.name}, beside the reference", reference.tasks.get(result.name)
    if before is None:
        listed = ", ".join(reference.tasks) or "none"
        return GateLine(
            name=name,
            verdict=GateVerdict.UNDECIDED,
            measured=f"{reference.path} has no task {result.name}; it has {listed}",
            remedy="record it with --record, or leave the task out",
        )
    differences = _differences(result, before)
    if differences and not force:
        return GateLine(
            name=name,
            verdict=GateVerdict.UNDECIDED,
            measured=f"not comparable: {'; '.join(differences)}",
            remedy="record a new reference with --record, or compare the questions that both have with --force",
        )
    earlier = {one.id: one.right for one in before.outcomes}
    pairs = [(earlier[one.id], one.right) for one in result.outcomes if one.id in earlier]
    if not pairs:
        return GateLine(name=name, verdict=GateVerdict.UNDECIDED, measured="no question of the reference was asked")
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    p, least = paired_p(lost, won), 1 - LEVEL
    is_worse = lost > won and p < least
    return GateLine(
        name=name,
        verdict=GateVerdict.FAILED if is_worse else GateVerdict.PASSED,
        measured=f"of {len(pairs)} questions {lost} became wrong and {won} right, p = {p:.3g} (McNemar); "
        f"before: {before.described()}",
        rule=f"fails where more became wrong than right, and p is below {least:.2g}",
        remedy=f"first ones that became wrong: {', '.join(_lost(result.outcomes, earlier)[:5])}" if is_worse else "",
        numbers={"lost": lost, "won": won, "p": p},
    )


def _lost(outcomes: Sequence[EvalOutcome], earlier: Mapping[str, bool]) -> list[str]:
    return [one.id for one in outcomes if earlier.get(one.id) and not one.right]


def _differences(now: TaskResult, before: TaskResult) -> list[str]:
    """What differs in the questions and in how they were asked; the model may differ."""
    found = [
        f"{name} is {json.dumps(now.settings.get(name))}, and was {json.dumps(before.settings.get(name))}"
        for name in sorted(now.settings.keys() | before.settings.keys())
        if now.settings.get(name) != before.settings.get(name)
    ]
    if now.digest != before.digest:
        found.append(f"the questions differ ({len(now.outcomes)} now, {len(before.outcomes)} before)")
    return found
