"""The report of a gate: the exit code, and the forms for people, JUnit and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tp_engine.apps.gates.report import GateLine, GateReport, GateVerdict, parse_share
from tp_engine.errors import ConfigError


def report(*verdicts: GateVerdict) -> GateReport:
    lines = [GateLine(name=f"figure {one}", verdict=one, measured="1.0", rule="at least 2") for one in verdicts]
    return GateReport(program="tp-engine eval", subject="demo", lines=lines, notes=["a note"])


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ("passed", 0), ("measured", 0), ("passed measured", 0), ("passed undecided", 2),
        ("undecided failed passed", 1), ("", 2),
    ],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_worst_line(verdicts: str, code: int) -> None:
    """Oracle: the table in the module: 1 for what failed, 2 for what cannot be told, and for nothing measured."""
    assert report(*map(GateVerdict, verdicts.split())).exit_code == code


def test_all_forms_tell_all_lines() -> None:
    """Oracle: JUnit's kinds of elements; every form has each line's name, rule and the notes."""
    found = report(*GateVerdict)
    suite = ElementTree.fromstring(found.as_junit()).find("testsuite")
    assert suite is not None
    assert [suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "0"]
    kinds = {case.attrib["name"]: [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {
        "figure passed": ["system-out"], "figure failed": ["failure"],
        "figure undecided": ["error"], "figure measured": ["system-out"],
    }  # fmt: skip
    for text in (found.as_text(), found.as_markdown()):
        assert all(f"figure {one}" in text for one in GateVerdict)
        assert "at least 2" in text and "a note" in text and found.summary in text
    content = json.loads(found.as_json())
    assert content["exit_code"] == 1 and [line["verdict"] for line in content["lines"]] == list(GateVerdict)


def test_texts_of_a_server_are_shown_not_obeyed(tmp_path: Path) -> None:
    """Oracle: Markdown's and XML's special characters, and a control character, in the name of a model."""
    name = "a|b <img src=x> [c](http://x) \x1b[31m"
    found = GateReport(
        program="tp-engine eval", subject=name, lines=[GateLine(name=name, verdict=GateVerdict.PASSED, measured=name)]
    )
    row = found.as_markdown().splitlines()[4]
    assert row.replace("\\|", "").count("|") == 5 and "<img" not in row and "[c]" not in row
    ElementTree.fromstring(found.as_junit())
    assert "\x1b" not in found.as_text() + found.as_markdown() + found.as_junit()
    found.write(junit=str(tmp_path / "junit.xml"), markdown=str(tmp_path / "report.md"))


def test_a_step_of_githubs_gets_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: GITHUB_STEP_SUMMARY is a file to which steps append."""
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    found = report(GateVerdict.PASSED)
    found.write(junit=None, markdown=None)
    assert summary.read_text(encoding="utf-8") == f"before\n{found.as_markdown()}\n"


def test_shares_may_be_percent() -> None:
    """Oracle: by hand; the error names the value."""
    assert [parse_share("x", text) for text in ("90%", "0.9", "0", "100%")] == [0.9, 0.9, 0.0, 1.0]
    for text in ("101%", "-1", "nan", "", "%", "ten"):
        with pytest.raises(ConfigError, match="a share"):
            parse_share("x", text)
