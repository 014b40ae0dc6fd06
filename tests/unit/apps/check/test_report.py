"""The report of a check: text, JSON, JUnit and the exit code."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tp_engine.apps.check.report import CheckFinding, CheckReport, CheckStatus, describe_environment

RIGHT = CheckFinding(name="tokens", status=CheckStatus.RIGHT, detail="12 prompts", numbers={"prompts": 12}, seconds=0.5)
WRONG = CheckFinding(
    name="hidden states",
    status=CheckStatus.WRONG,
    detail="layer 3 <is> off\x00",
    place="layer 3, rank 1, position 7",
    meaning="answers are wrong",
    remedy="--enforce-eager",
)
SKIPPED = CheckFinding(name="speculation", status=CheckStatus.SKIPPED, detail="not asked for")
FAILED = CheckFinding(name="chat", status=CheckStatus.NOT_CHECKED, detail="no template")


@pytest.mark.parametrize(
    ("findings", "code"),
    [((RIGHT, SKIPPED), 0), ((RIGHT, WRONG, FAILED), 1), ((RIGHT, FAILED), 2), ((SKIPPED,), 2), ((), 2)],
)
def test_exit_code(findings: tuple[CheckFinding, ...], code: int) -> None:
    """Oracle: 0 right, 1 wrong, 2 could not be checked; a check of nothing is not right."""
    report = CheckReport(subject="m", findings=findings)
    assert report.exit_code == code
    assert json.loads(report.as_json())["exit_code"] == code


def test_text_says_where_why_and_what_to_try() -> None:
    """Oracle: the words of the finding, in at most 120 columns."""
    text = CheckReport(subject="m", findings=(RIGHT, WRONG, SKIPPED)).as_text()
    for word in ("layer 3, rank 1, position 7", "answers are wrong", "--enforce-eager", "1 right", "WRONG"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120 and all(map(str.isprintable, text.splitlines()))


def test_junit_is_what_ci_systems_read() -> None:
    """Oracle: an XML parser, and the counts of JUnit's schema."""
    report = CheckReport(subject="m", findings=(RIGHT, WRONG, SKIPPED, FAILED), environment={"torch": "2"})
    suite = ElementTree.fromstring(report.as_junit()).find("testsuite")
    assert suite is not None
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    failure = suite.find("testcase[@name='hidden states']/failure")
    assert failure is not None and "rank 1" in (failure.text or "")
    assert {one.get("name") for one in suite.iter("property")} == {"subject", "torch"}


def test_environment_names_versions_and_hardware() -> None:
    """Oracle: the packages' own versions."""
    import torch

    found = describe_environment()
    assert found["torch"] == torch.__version__ and found["cpu"]
