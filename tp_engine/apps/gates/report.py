"""What a gate finds: a line for each figure, its verdict, and the exit code of the job.

::

    0    every figure is where it must be, or nothing was demanded of it
    1    a figure is on the wrong side of its limit, by more than its error explains
    2    it cannot be told: the error is too large, the reference is of something else, or nothing could be measured
"""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tp_engine.apps.gates.junit import JUnitCase, as_junit
from tp_engine.errors import ConfigError, printable, shown
from tp_engine.system import env
from tp_engine.system.version import __version__

EXIT_PASSED, EXIT_FAILED, EXIT_UNDECIDED = 0, 1, 2
_COLUMNS, _INDENT = 120, 13


class GateVerdict(enum.StrEnum):
    """``MEASURED``: nothing was demanded of the figure; ``UNDECIDED``: its error is too large, or there is none."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"
    MEASURED = "measured"


_MARKS = {
    GateVerdict.PASSED: "  ok   ",
    GateVerdict.FAILED: "FAILED ",
    GateVerdict.UNDECIDED: "  ??   ",
    GateVerdict.MEASURED: "       ",
}
_SYMBOLS = {GateVerdict.PASSED: "✅", GateVerdict.FAILED: "❌", GateVerdict.UNDECIDED: "❔", GateVerdict.MEASURED: ""}
_JUNIT_KINDS = {GateVerdict.FAILED: "failure", GateVerdict.UNDECIDED: "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    """A figure with its error (``measured``), what was demanded of it (``rule``), and what to do about it
    (``remedy``); ``numbers`` are the figures for programs."""

    name: str
    verdict: GateVerdict
    measured: str
    rule: str = ""
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """All lines of ``program``, such as ``tp-engine eval``, about ``subject``.

    ``notes`` are what a reader must know of all of them; ``content`` is more for programs, such as single answers.
    """

    program: str
    subject: str
    lines: Sequence[GateLine]
    notes: Sequence[str] = ()
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> GateVerdict:
        """The worst of the lines; undecided without any."""
        found = {line.verdict for line in self.lines}
        worst_first = (GateVerdict.FAILED, GateVerdict.UNDECIDED, GateVerdict.PASSED, GateVerdict.MEASURED)
        return next((one for one in worst_first if one in found), GateVerdict.UNDECIDED)

    @property
    def exit_code(self) -> int:
        return {GateVerdict.FAILED: EXIT_FAILED, GateVerdict.UNDECIDED: EXIT_UNDECIDED}.get(self.verdict, EXIT_PASSED)

    @property
    def summary(self) -> str:
        counts = {one: sum(line.verdict is one for line in self.lines) for one in GateVerdict}
        listed = ", ".join(f"{count} {one}" for one, count in counts.items() if count)
        return f"{self.verdict}: {listed or 'nothing was measured'}"

    def as_text(self) -> str:
        """Return a paragraph for each line, and the verdict."""
        text = [f"{self.program}: {self.subject}"]
        for line in self.lines:
            text += _wrapped(f"  [{_MARKS[line.verdict]}] ", f"{line.name}: {line.measured}")
            text += [part for more in (line.rule, line.remedy) if more for part in _wrapped(" " * _INDENT, more)]
        text += [part for note in self.notes for part in _wrapped("  note: ", note)]
        return printable("\n".join([*text, self.summary]))

    def as_json(self) -> str:
        """Return the lines and ``content`` as a JSON object."""
        lines = [
            {
                "name": line.name,
                "verdict": line.verdict,
                "measured": line.measured,
                "rule": line.rule,
                "remedy": line.remedy,
                "numbers": dict(line.numbers),
            }
            for line in self.lines
        ]
        about = {"version": __version__, "program": self.program, "subject": self.subject, "verdict": self.verdict}
        found = {"exit_code": self.exit_code, "lines": lines, "notes": list(self.notes), **self.content}
        return json.dumps({**about, **found}, indent=2)

    def as_junit(self) -> str:
        """Return JUnit's XML: a line that failed is a failure, one that is undecided an error."""
        cases = (
            JUnitCase(
                name=line.name,
                kind=_JUNIT_KINDS.get(line.verdict),
                message=line.measured,
                text="\n".join(filter(None, (line.rule, line.remedy, *self.notes))),
                seconds=line.seconds,
            )
            for line in self.lines
        )
        return as_junit(self.program, {"subject": self.subject, "version": __version__}, cases)

    def as_markdown(self) -> str:
        """Return a heading and a table, as GitHub and GitLab show it."""
        rows = [
            f"| {_SYMBOLS[line.verdict]} {line.verdict} | {_cell(line.name)} | {_cell(line.measured)} "
            f"| {_cell(' '.join(filter(None, (line.rule, line.remedy))))} |"
            for line in self.lines
        ]
        head = [f"### {_cell(self.program)}: {_cell(self.subject)}", "", "| | figure | measured | rule |"]
        notes = [line for note in self.notes for line in ("", _cell(note))]
        return "\n".join([*head, "| --- | --- | --- | --- |", *rows, *notes, "", f"**{self.summary}**", ""])

    def write(self, *, junit: str | None, markdown: str | None) -> None:
        """Write the files that are asked for; a step of GitHub's also gets the Markdown in its summary."""
        if junit is not None:
            Path(junit).write_text(self.as_junit(), encoding="utf-8")
        if markdown is not None:
            Path(markdown).write_text(self.as_markdown(), encoding="utf-8")
        if summary := env.GITHUB_STEP_SUMMARY.read():
            with open(summary, "a", encoding="utf-8") as file:
                file.write(self.as_markdown() + "\n")


def make_folder(name: str, path: str | None) -> None:
    """Make the folder of a file that is written at the end; ``ConfigError`` that names the option if that fails."""
    if path is None:
        return
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{name} is {path!r}; its folder cannot be made ({error.strerror}): give another file"
        ) from error
    if Path(path).is_dir():
        raise ConfigError(f"{name} is {path!r}, which is a folder: give a file")


def parse_share(name: str, text: str) -> float:
    """Return ``90%`` or ``0.9`` as a share; raises ``ConfigError``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{name} is {shown(text)}; it must be a share such as 90% or 0.9")
    return share


def _cell(text: str) -> str:
    """``text`` in a cell of a table: what Markdown and HTML would obey is shown as it is."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    for mark in "|`*_[]":
        plain = plain.replace(mark, f"\\{mark}")
    return " ".join(plain.split())


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=first, subsequent_indent=" " * _INDENT, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
