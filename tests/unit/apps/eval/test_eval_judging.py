"""From outcomes to verdicts: the rule of thresholds, and the comparison with an earlier run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tp_engine.apps.eval.judging import EvalOutcome, Reference, TaskResult, questions_needed, reference_line, share_line
from tp_engine.errors import ConfigError


def result(rights: list[bool], **more: Any) -> TaskResult:
    fields = {"name": "sums", "digest": "d", "settings": {"chat": True}} | more
    return TaskResult(outcomes=[EvalOutcome(str(place), right) for place, right in enumerate(rights)], **fields)


def of(num_right: int, num: int) -> TaskResult:
    return result([place < num_right for place in range(num)])


@pytest.mark.parametrize(
    ("num_right", "num", "threshold", "verdict"),
    [
        (190, 200, 0.95, "passed"),  # the share itself is enough
        (186, 200, 0.95, "undecided"),  # 93 %, up to 95.8 %
        (180, 200, 0.95, "failed"),  # 90 %, up to 93.4 %
        (9, 10, 0.95, "undecided"), (5, 10, 0.95, "failed"), (0, 10, 0.0, "passed"), (10, 10, 1.0, "passed"),
        (150, 200, None, "measured"),
    ],
)  # fmt: skip
def test_thresholds(num_right: int, num: int, threshold: float | None, verdict: str) -> None:
    """Oracle: the rule: passed from the threshold on, failed where Wilson's upper bound is below, undecided between."""
    line = share_line(of(num_right, num), threshold)
    assert line.verdict == verdict
    assert f"{num_right} of {num} right" in line.measured and line.numbers["share"] == num_right / num


def test_how_many_questions_would_tell() -> None:
    """Oracle: the rule itself with that number; none tell a share from itself."""
    needed = questions_needed(0.93, 0.95)
    assert needed is not None and share_line(of(round(0.93 * needed), needed), 0.95).verdict == "failed"
    assert questions_needed(0.95, 0.95) is None
    assert f"about {needed:,} would do" in share_line(of(186, 200), 0.95).remedy


def reference(before: TaskResult) -> Reference:
    return Reference("ref.json", "demo", {before.name: before})


@pytest.mark.parametrize(
    ("lost", "won", "verdict"),
    [(0, 0, "passed"), (5, 0, "passed"), (6, 0, "failed"), (0, 9, "passed"), (12, 2, "failed"), (12, 6, "passed")],
)
def test_beside_an_earlier_run(lost: int, won: int, verdict: str) -> None:
    """Oracle: McNemar's exact test at 5 %: six that all became wrong are beyond chance (2/64), five are not (2/32)."""
    rest = 50
    before = result([True] * lost + [False] * won + [True] * rest)
    now = result([False] * lost + [True] * won + [True] * rest)
    line = reference_line(now, reference(before), force=False)
    assert line.verdict == verdict and f"{lost} became wrong and {won} right" in line.measured
    assert ("first ones that became wrong: 0, 1" in line.remedy) == (verdict == "failed")


def test_other_questions_are_not_comparable() -> None:
    """Oracle: what differs is named; --force compares the questions that both have."""
    before = of(3, 4)
    for now, told in (
        (msgspec.structs.replace(before, digest="e"), "the questions differ"),
        (msgspec.structs.replace(before, settings={"chat": False}), "chat is false, and was true"),
        (msgspec.structs.replace(before, settings={"chat": True, "num_fewshot": 2}), "num_fewshot is 2, and was null"),
        (msgspec.structs.replace(before, name="others"), "has no task others; it has sums"),
    ):
        line = reference_line(now, reference(before), force=False)
        assert line.verdict == "undecided" and told in line.measured
    more = msgspec.structs.replace(of(6, 8), digest="e")
    forced = reference_line(more, reference(before), force=True)
    assert forced.verdict == "passed" and "of 4 questions 0 became wrong and 1 right" in forced.measured
    none = dataclasses.replace(reference(before), tasks={"sums": result([])})
    assert reference_line(before, none, force=False).measured == "no question of the reference was asked"


@pytest.mark.parametrize("content", ["", "{}", '{"subject": "x", "tasks": [{"name": 1}]}', "\xff"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    """Oracle: the error names the file and the option that writes one."""
    path = tmp_path / "ref.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="--record did not write"):
        Reference.read(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        Reference.read(str(tmp_path / "none.json"))
