"""A pytest plugin: ``--expected-skips FILE`` prints the skipped tests by reason, and fails the run on one not in FILE.

A line of FILE is ``tests | reason | why it is expected``; the first two are shell patterns for the test's id and the
reason of its skip.  Empty lines and lines that begin with ``#`` are comments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Expectation:
    """A line of the file."""

    tests: str
    reason: str
    why: str

    def matches(self, test: str, reason: str) -> bool:
        return fnmatchcase(test, self.tests) and fnmatchcase(reason, self.reason)


def read_expectations(path: Path) -> list[Expectation]:
    """The lines of ``path``; ``pytest.UsageError`` names a line without three parts."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or not all(parts):
            raise pytest.UsageError(f"{path}:{number}: {line!r}; a line is 'tests | reason | why it is expected'")
        found.append(Expectation(*parts))
    return found


@dataclass(eq=False)  # pytest has its plugins in a set
class SkipReport:
    """Collects the skips of a run; with xdist it runs in the controller, which gets the reports of all workers."""

    expectations: list[Expectation]
    skips: set[tuple[str, str]] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            self.skips.add((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))

    def why(self, test: str, reason: str) -> str | None:
        """The reason why this skip is expected; None if it is not."""
        return next((one.why for one in self.expectations if one.matches(test, reason)), None)

    def unexpected(self) -> list[tuple[str, str]]:
        return sorted(skip for skip in self.skips if self.why(*skip) is None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("skipped tests by reason")
        counts = Counter((reason, self.why(test, reason)) for test, reason in self.skips)
        for (reason, why), count in counts.most_common():
            terminalreporter.line(f"{count:5}  {reason}  ({why or 'NOT EXPECTED'})")
        terminalreporter.line(f"{len(self.skips):5}  in all")
        for test, reason in self.unexpected():
            terminalreporter.line(f"SKIPPED BUT NOT EXPECTED: {test}: {reason}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expected-skips", metavar="FILE", help="fail if a test is skipped that FILE does not list")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--expected-skips")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipReport(read_expectations(Path(path))))
