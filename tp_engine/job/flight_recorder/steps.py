"""What happened in a step of a flight record: what the plan asked for, and where each rank's time went.

::

    step N - 1 done     plan received     begun        launched          done
        |   plan wait        |              |    run      |     finish     |

A step is compared with the *usual* time of those like it: decodes alone, or steps with prompt tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tp_engine.job.flight_recorder.record import FlightRecord, StepRecord
from tp_engine.job.flight_recorder.report import table

_HEADER = ("rank", "plan wait", "run", "finish", "total", "usual", "begun after the first", "done after the first")
_LONG = 3.0  # times the usual time of a step


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's part of a step, in nanoseconds; ``took`` and ``finish`` are None while it has not ended."""

    rank: int
    step: StepRecord
    free_ns: int
    """When the rank had ended the step before, or 0."""

    @property
    def plan_wait(self) -> int:
        """The time without a plan; 0 if it came before the rank was free, or if that is not known."""
        return max(0, self.step.received_ns - self.free_ns) if self.free_ns else 0

    @property
    def begun(self) -> int:
        """When it began: a step that was sent ahead waits for the one before."""
        return max(self.step.started_ns, self.free_ns)

    @property
    def took(self) -> int | None:
        """The time from its begin to its end."""
        return max(0, self.step.done_ns - self.begun) if self.step.done_ns else None

    @property
    def run(self) -> int | None:
        """The time until the model and the sampler were launched; on CPUs, until they had run."""
        return max(0, self.step.launched_ns - self.begun) if self.step.launched_ns else None


def parts_of(record: FlightRecord) -> dict[int, list[RankStep]]:
    """Return each recorded step's parts, by its number."""
    found: dict[int, list[RankStep]] = {}
    for rank in record.ranks:
        done_ns = {step.step_id: step.done_ns for step in rank.steps}
        for step in rank.steps:
            part = RankStep(rank.rank, step, done_ns.get(step.step_id - 1, 0))
            found.setdefault(step.step_id, []).append(part)
    return dict(sorted(found.items()))


def slowest_lines(record: FlightRecord, number: int) -> list[str]:
    """Return a line for each of the ``number`` steps that took longest beside those like them, the worst first."""
    steps = parts_of(record)
    usual = _usual(steps)
    ratios = {one: _took(parts) / usual[_kind(parts)] for one, parts in steps.items() if _took(parts)}
    worst = sorted(ratios, key=lambda one: -ratios[one])[:number]
    rows = [(str(one), f"{_took(steps[one]) / 1e6:.1f}", f"{ratios[one]:.1f}x", _asked(steps[one])) for one in worst]
    return table(("step", "ms", "of usual", "what it ran"), rows) if rows else ["No step has ended."]


def step_lines(record: FlightRecord, step_id: int) -> list[str]:
    """Return what is known of a step; a line that names the recorded ones if it is none of them."""
    steps = parts_of(record)
    if step_id not in steps:
        if not steps:
            return ["No steps are recorded."]
        return [f"Step {step_id} is not recorded; those from {min(steps)} to {max(steps)} are."]
    parts = steps[step_id]
    usual = _usual(steps).get(_kind(parts), 0.0)
    first = min(part.begun for part in parts)
    ends = [part.step.done_ns for part in parts if part.step.done_ns]
    rows = [
        (
            str(part.rank),
            _ms(part.plan_wait),
            _ms(part.run),
            _ms(None if part.took is None or part.run is None else part.took - part.run),
            _ms(part.took),
            _ms(usual),
            _ms(part.begun - first),
            _ms(part.step.done_ns - min(ends) if part.step.done_ns else None),
        )
        for part in parts
    ]
    return [f"Step {step_id}: {_asked(parts)}; times in ms", *table(_HEADER, rows), *_reasons(parts, usual)]


def _asked(parts: Sequence[RankStep]) -> str:
    """The plan, in words."""
    step = parts[0].step
    plan = f", a plan of {step.plan_bytes} bytes" if step.plan_bytes else ""
    return f"{step.decode_rows} decodes, {step.prefill_tokens} prompt tokens{plan}"


def _reasons(parts: Sequence[RankStep], usual: float) -> list[str]:
    """Sentences on what stands out, none if nothing does."""
    said = []
    open_ = [part for part in parts if part.took is None]
    if open_:
        said.append(f"It has not ended on {_named(open_)}.")
    limit = max(usual * (_LONG - 1), 1.0)
    last = max(parts, key=lambda part: part.begun)
    behind = last.begun - min(part.begun for part in parts)
    if len(parts) > 1 and behind > limit:
        others = "waited for its plan" if last.plan_wait > behind / 2 else "had its plan, and did not run"
        said.append(f"Rank {last.rank} began {_ms(behind)} ms after the first one: it {others}.")
    waits = [part for part in parts if part.plan_wait > limit]
    if waits and len(waits) == len(parts):
        said.append("All ranks waited for the plan: there was nothing to run, or rank 0 was late with it.")
    slow = [part for part in parts if usual and behind <= limit and (part.run or 0) > usual * _LONG]
    said += [f"Rank {part.rank} took {(part.run or 0) / usual:.1f} times as long as usual to run it." for part in slow]
    return said or ["Nothing stands out."]


def _usual(steps: dict[int, list[RankStep]]) -> dict[bool, float]:
    """The median time of steps with and without prompt tokens, in nanoseconds."""
    times: dict[bool, list[int]] = {True: [], False: []}
    for parts in steps.values():
        if took := _took(parts):
            times[_kind(parts)].append(took)
    return {kind: float(statistics.median(found)) for kind, found in times.items() if found}


def _kind(parts: Sequence[RankStep]) -> bool:
    """Whether the step has prompt tokens."""
    return parts[0].step.prefill_tokens > 0


def _took(parts: Sequence[RankStep]) -> int:
    """From the first rank's begin to the last rank's end; 0 while a rank has not ended."""
    if any(part.took is None for part in parts):
        return 0
    return max(part.step.done_ns for part in parts) - min(part.begun for part in parts)


def _named(parts: Sequence[RankStep]) -> str:
    return ", ".join(f"rank {part.rank}" for part in parts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"
