"""What a check finds: a table for people, JSON, JUnit, and the exit code."""

from __future__ import annotations

import dataclasses
import enum
import json
import platform
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tp_engine.apps.gates.junit import JUnitCase, as_junit
from tp_engine.errors import printable
from tp_engine.system.version import __version__, installed_version

EXIT_RIGHT, EXIT_WRONG, EXIT_NOT_CHECKED = 0, 1, 2
_COLUMNS = 120
_INDENT = 10
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


class CheckStatus(enum.StrEnum):
    """``SKIPPED``: does not apply here, or was not asked for; ``NOT_CHECKED``: should have been checked, and failed."""

    RIGHT = "right"
    WRONG = "wrong"
    SKIPPED = "skipped"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One line of the table.

    ``name`` is the check's, such as ``hidden states``; ``detail`` what was compared, with the figures; ``place`` where
    it is wrong (layer, rank, position); ``meaning`` what that means for answers; ``remedy`` what to try.  ``numbers``
    are the figures for programs.
    """

    name: str
    status: CheckStatus
    detail: str
    place: str = ""
    meaning: str = ""
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def right(cls, name: str, detail: str, **more: Any) -> CheckFinding:
        """A finding that what was compared is right; ``more`` are other fields."""
        return cls(name=name, status=CheckStatus.RIGHT, detail=detail, **more)

    @classmethod
    def wrong(
        cls, name: str, detail: str, place: str = "", meaning: str = "", remedy: str = "", **more: Any
    ) -> CheckFinding:
        """A finding of what is wrong; ``more`` are the other fields."""
        more |= {"place": place, "meaning": meaning, "remedy": remedy}
        return cls(name=name, status=CheckStatus.WRONG, detail=detail, **more)

    @classmethod
    def not_checked(cls, name: str, detail: str, **more: Any) -> CheckFinding:
        """A finding of why something that should have been compared was not."""
        return cls(name=name, status=CheckStatus.NOT_CHECKED, detail=detail, **more)

    @classmethod
    def skipped(cls, name: str, detail: str, **more: Any) -> CheckFinding:
        """A finding of why this need not be compared."""
        return cls(name=name, status=CheckStatus.SKIPPED, detail=detail, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All findings about ``subject``, a model or a server; ``environment`` has versions and hardware."""

    subject: str
    findings: tuple[CheckFinding, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 if a finding is wrong; else 2 if something could not be checked, or nothing was; else 0."""
        statuses = {one.status for one in self.findings}
        if CheckStatus.WRONG in statuses:
            return EXIT_WRONG
        return (
            EXIT_NOT_CHECKED if CheckStatus.NOT_CHECKED in statuses or CheckStatus.RIGHT not in statuses else EXIT_RIGHT
        )

    def as_text(self) -> str:
        """A line for each finding; those that are not right say where, what it means and what to try."""
        return printable("\n".join([f"check of {self.subject}", *(_lines(self.findings)), self.summary]))

    @property
    def summary(self) -> str:
        counts = {status: sum(one.status is status for one in self.findings) for status in CheckStatus}
        listed = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
        word = ("right", "WRONG", "could not be checked")[self.exit_code]
        return f"{word}: {listed or 'nothing was checked'}"

    def as_json(self) -> str:
        content = {
            "version": __version__,
            "subject": self.subject,
            "result": ("right", "wrong", "not checked")[self.exit_code],
            "exit_code": self.exit_code,
            "environment": dict(self.environment),
            "findings": [dataclasses.asdict(one) for one in self.findings],
        }
        return printable(json.dumps(content, indent=2, ensure_ascii=False))

    def as_junit(self) -> str:
        """Return JUnit's XML, a test case for each finding: wrong is a failure, not checked an error."""
        kinds = {CheckStatus.WRONG: "failure", CheckStatus.NOT_CHECKED: "error", CheckStatus.SKIPPED: "skipped"}
        cases = (
            JUnitCase(
                name=one.name,
                kind=kinds.get(one.status),
                message=one.detail,
                text="\n".join(filter(None, (one.place, one.meaning, one.remedy))),
                seconds=one.seconds,
            )
            for one in self.findings
        )
        return as_junit("tp-engine check", {"subject": self.subject, **self.environment}, cases)


def describe_environment() -> dict[str, str]:
    """Return versions and hardware of this machine."""
    found = {"tp_engine": __version__, "python": platform.python_version(), "system": platform.platform()}
    found |= {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    import torch

    found["cpu"] = _cpu_name()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found |= {"gpus": ", ".join(names), "cuda": str(torch.version.cuda)}
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _lines(findings: Iterable[CheckFinding]) -> Iterable[str]:
    marks = {
        CheckStatus.RIGHT: "  ok   ",
        CheckStatus.WRONG: " WRONG ",
        CheckStatus.SKIPPED: " skip  ",
        CheckStatus.NOT_CHECKED: "  ??   ",
    }
    for one in findings:
        yield from _wrapped(f"[{marks[one.status]}] ", f"{one.name:<22} {one.detail}")
        if one.status in (CheckStatus.WRONG, CheckStatus.NOT_CHECKED):
            for label, text in (("where: ", one.place), ("means: ", one.meaning), ("try:   ", one.remedy)):
                if text:
                    yield from _wrapped(" " * _INDENT + label, text)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=first, subsequent_indent=" " * (_INDENT + 7), break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip
