"""A gate of speed: the figures of several repeats, beside those of a baseline that ``--record`` wrote.

A single run's figure says little: the next run's differs by some percent by itself.  So all is measured ``--repeats``
times, each time with an engine that starts anew, for its start (memory, threads, clocks) is part of the noise and does
not average out within one.  Of both sets of repeats the ratio of speeds is told with its 95% interval, by Welch's
method on logarithms (``gates/statistics.py`` has the sources)::

    passed       the whole interval is above 1 - tolerance
    failed       the whole interval is below it
    undecided    1 - tolerance lies within: the noise is too large for this tolerance

Figures of another machine, model, benchmark or load are not compared.  What an interval cannot know is what differs
between two days: another neighbour on the host, another temperature.  Where that matters, both are measured in one job.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.apps.gates.recorded import read_recorded
from tp_engine.apps.gates.report import GateLine, GateReport, GateVerdict, make_folder, parse_share
from tp_engine.apps.gates.statistics import Interval, ratio_interval
from tp_engine.errors import ConfigError, shown
from tp_engine.system.units import MIB
from tp_engine.system.version import __version__

SEEDS_OF_A_REPEAT = 10_000
"""Each repeat has prompts of its own, the same ones in the baseline's repeat of that number."""
_REPEATS, _LEAST_REPEATS, _MANY_REPEATS = 5, 3, 100
_MOST_BYTES = 16 * MIB
_TOLERANCE = 0.05
_MILLISECONDS = re.compile(r"(?<![a-z])ms(_per_token)?$")


class SpeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What ran where, and the figures of every repeat by name; one in ``ms`` or ``ms_per_token`` is a time, which is
    better if it is smaller."""

    benchmark: str
    machine: str
    model: str
    options: dict[str, Any]
    figures: dict[str, list[float]] = {}
    version: str = __version__


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedGate:
    """What is demanded of a run, as the command line says it; ``baseline`` None: nothing."""

    repeats: int
    record: str | None
    junit: str | None
    markdown: str | None
    baseline: SpeedRun | None
    baseline_path: str
    tolerance: float
    force: bool

    @staticmethod
    def of(args: argparse.Namespace) -> SpeedGate | None:
        """The gate that ``args`` ask for; None without ``--record`` and ``--against``.  Raises ``ConfigError``."""
        if args.record is None and args.against is None:
            for name in ("repeats", "tolerance", "junit", "markdown"):
                if getattr(args, name) is not None:
                    raise ConfigError(f"{name} is for a gate: give --record or --against too, or leave it out")
            if args.force:
                raise ConfigError("force is for a comparison: give --against too, or leave it out")
            return None
        if args.repeats is not None and args.repeats < _LEAST_REPEATS:
            raise ConfigError(f"repeats is {args.repeats}; it must be at least {_LEAST_REPEATS}, or noise is not known")
        for name in ("record", "junit", "markdown"):
            make_folder(name, getattr(args, name))
        return SpeedGate(
            repeats=args.repeats or _REPEATS,
            record=args.record,
            junit=args.junit,
            markdown=args.markdown,
            baseline=None if args.against is None else read_baseline(args.against),
            baseline_path=args.against or "",
            tolerance=_TOLERANCE if args.tolerance is None else parse_share("tolerance", args.tolerance),
            force=args.force,
        )

    def refusal(self, run: SpeedRun) -> GateReport | None:
        """The report that ``run``, which need not have figures yet, cannot be compared; None if it can."""
        if self.baseline is None or self.force or not (found := differences(run, self.baseline)):
            return None
        line = GateLine(
            name="baseline",
            verdict=GateVerdict.UNDECIDED,
            measured=f"not comparable: {'; '.join(found)}",
            remedy="record a baseline of this with --record, or compare all the same with --force",
        )
        return self._report(run, [line])

    def judge(self, run: SpeedRun, failures: str = "") -> GateReport:
        """Record the run, and compare it; ``failures`` say what went wrong in it."""
        notes = []
        if self.record is not None and not failures:
            notes.append(f"recorded in {self.record}")
            text = json.dumps(msgspec.to_builtins(run), indent=1)
            Path(self.record).write_text(text + "\n", encoding="utf-8")
        lines = []
        if failures:
            lines.append(GateLine(name="requests", verdict=GateVerdict.FAILED, measured=failures))
        known = {} if self.baseline is None else self.baseline.figures
        for name, values in run.figures.items():
            if name in known and min(*values, *known[name]) > 0:
                lines.append(speed_line(name, known[name], values, self.tolerance))
            else:
                lines.append(GateLine(name=name, verdict=GateVerdict.MEASURED, measured=_spread(values)))
        if missing := [name for name in known if name not in run.figures]:
            text = f"not measured now: {', '.join(missing)}"
            lines.append(GateLine(name="baseline", verdict=GateVerdict.UNDECIDED, measured=text))
        return self._report(run, lines, notes)

    def _report(self, run: SpeedRun, lines: Sequence[GateLine], notes: Sequence[str] = ()) -> GateReport:
        notes = list(notes)
        if self.baseline is not None:
            count = max((len(values) for values in self.baseline.figures.values()), default=0)
            notes.append(f"{self.baseline_path}: {count} repeats of tp_engine {self.baseline.version}")
            if self.force and (found := differences(run, self.baseline)):
                notes.append(f"compared although {'; '.join(found)}")
        report = GateReport(
            program=f"tp-engine bench {run.benchmark}",
            subject=f"{run.model} on {run.machine}",
            lines=lines,
            notes=notes,
            content={"figures": run.figures},
        )
        report.write(junit=self.junit, markdown=self.markdown)
        return report


def add_gate_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``SpeedGate.of`` reads."""
    group = parser.add_argument_group("a gate for jobs: exit code 1 for a regression, 2 where it cannot be told")
    group.add_argument("--record", metavar="FILE", help="write the figures of all repeats: a baseline for --against")
    group.add_argument("--against", metavar="FILE", help="compare with a baseline that --record wrote on this machine")
    group.add_argument("--tolerance", metavar="SHARE", help="how much slower is not yet a regression (default: 5%%)")
    group.add_argument("--repeats", type=int, help=f"measure as often, each time started anew (default: {_REPEATS})")
    group.add_argument("--force", action="store_true", help="compare although machine, model or load differ")
    group.add_argument("--junit", metavar="FILE", help="the verdicts as JUnit's XML")
    group.add_argument("--markdown", metavar="FILE", help="the same as Markdown, which $GITHUB_STEP_SUMMARY gets too")


def read_baseline(path: str) -> SpeedRun:
    """Return the run in ``path``; raises ``ConfigError``."""
    found = read_recorded(path, SpeedRun, max_bytes=_MOST_BYTES)
    if few := next((name for name, values in found.figures.items() if len(values) < _LEAST_REPEATS), None):
        raise ConfigError(f"against is {path!r}, which has fewer than {_LEAST_REPEATS} repeats of {shown(few)}")
    if not found.figures:
        raise ConfigError(f"against is {path!r}, which has no figures; record it anew with --record")
    return found


def differences(now: SpeedRun, before: SpeedRun) -> list[str]:
    """What keeps two runs from being compared, each with both values."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(now, name), getattr(before, name)) for name in ("benchmark", "machine", "model")
    }
    names = [*now.options, *(name for name in before.options if name not in now.options)]
    pairs |= {name: (now.options.get(name), before.options.get(name)) for name in names}
    return [f"{name} is {_told(one)}, and was {_told(other)}" for name, (one, other) in pairs.items() if one != other]


def speed_line(name: str, before: Sequence[float], now: Sequence[float], tolerance: float) -> GateLine:
    """The line of one figure: how fast it is now, as a share of the baseline's speed, and the verdict."""
    is_time = _MILLISECONDS.search(name) is not None
    ratio = ratio_interval(now, before) if is_time else ratio_interval(before, now)
    least = 1 - tolerance
    verdict, remedy = GateVerdict.PASSED, ""
    if ratio.high < least:
        verdict, remedy = GateVerdict.FAILED, f"{1 - ratio.estimate:.1%} slower than the baseline, beyond its noise"
    elif ratio.low < least:
        verdict = GateVerdict.UNDECIDED
        noise = (ratio.high - ratio.low) / 2
        cause = "larger than" if noise > tolerance else "too near"
        remedy = (
            f"the noise of {noise:.1%} is {cause} the tolerance of {tolerance:.1%}"
            f"{'' if noise > tolerance else ' to tell'}: {_repeats_needed(ratio, least, min(len(before), len(now)))}"
        )
    return GateLine(
        name=name,
        verdict=verdict,
        measured=f"{ratio.estimate:.3f} of the baseline's speed ({ratio.low:.3f} to {ratio.high:.3f}); {_spread(now)}, "
        f"was {_spread(before)}",
        rule=f"at least {least:.3g}, with the whole interval",
        remedy=remedy,
        numbers={"ratio": ratio.estimate, "low": ratio.low, "high": ratio.high, "least": least},
    )


def _repeats_needed(ratio: Interval, least: float, repeats: int) -> str:
    """How many repeats put the limit outside of the interval, whose width falls with the root of their number."""
    margin = abs(ratio.estimate - least)
    needed = math.inf if margin == 0 else repeats * ((ratio.high - ratio.low) / 2 / margin) ** 2
    if needed > _MANY_REPEATS:
        return "a quieter machine or a larger tolerance is needed"
    return f"a quieter machine, or about {math.ceil(needed)} repeats of both"


def _spread(values: Sequence[float]) -> str:
    """The mean, of logarithms where there are, and the least and the largest value."""
    mean = statistics.geometric_mean(values) if min(values) > 0 else statistics.fmean(values)
    return f"{mean:.4g} ({min(values):.4g} to {max(values):.4g})"


def _told(value: Any) -> str:
    return shown(value) if isinstance(value, str) else json.dumps(value)


def name_of_model(model: str | Path) -> str:
    """Return a model's name on every machine: a folder's name, with a hash of its config.json."""
    config = Path(model) / "config.json"
    return f"{Path(model).name} {digest_of(config)}" if config.is_file() else str(model)


def digest_of(path: Path) -> str:
    """Return a short hash of a file; raises ``ConfigError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def figures_by_name(repeats: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each figure, in the order of the repeats; a figure that a repeat lacks is left out."""
    names = [name for name in repeats[0] if all(name in one for one in repeats)]
    return {name: [one[name] for one in repeats] for name in names}
