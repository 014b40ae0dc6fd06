"""Candidates in a process that may die: wrong, crashing, hanging and slow ones are named, and a right one is taken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from tests.unit.worker.tuning.planted import SHAPE, make_place
from tp_engine.kernels.candidates import MANY, key_of
from tp_engine.worker.tuning import tuner
from tp_engine.worker.tuning.table import NOT_REACHED, RIGHT, Tried, TunedShape
from tp_engine.worker.tuning.trial_process import Said
from tp_engine.worker.tuning.tuner import NoRightKernelError, Tuner, WantedShape

CPU = torch.device("cpu")


def tune(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: str,
    *,
    own: str = "plain",
    silence_s: float = 60.0,
    budget_s: float = 120.0,
) -> TunedShape:
    """The choice for one shape among planted candidates."""
    monkeypatch.syspath_prepend(folder)
    made = Tuner(
        device=CPU,
        places={"planted": make_place(folder, faults, own=own)},
        rows=(1, 8),
        silence_s=silence_s,
        budget_s=budget_s,
    )
    return made.tune([WantedShape(operation="planted", shape=SHAPE)])[0]


def verdicts(found: TunedShape) -> dict[str, str]:
    return {one.candidate: one.verdict for one in found.tried}


def test_a_slow_default_is_left_for_a_fast_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: "slow" computes the same twelve times; wrong candidates are named with their error, and not timed."""
    failing = {
        "raises": "RuntimeError: no such instruction",
        "half": "ValueError: its result has the shape (1, 48) instead of (1, 96)",
        "outside": "ValueError: it writes outside of its memory",
        "changes inputs": "ValueError: it changes its inputs",
    }
    wrong = ("off by 0.002", "nan", "from seven rows", "leaves a row", "right once", *failing)
    with caplog.at_level(logging.DEBUG):
        found = tune(tmp_path, monkeypatch, ",".join(wrong), own="slow")
    assert found.choice == ((MANY, "plain"),) and found.default == ((MANY, "slow"),)
    said = verdicts(found)
    assert said["plain"] == said["slow"] == RIGHT
    assert {name: said[name] for name in failing} == {name: f"it failed: {text}" for name, text in failing.items()}
    assert all("it is wrong" in said[name] for name in wrong if name not in failing), said
    assert "at 7 rows" in said["from seven rows"] and "at 7 rows" in said["leaves a row"] and "finite" in said["nan"]
    timed = {one.candidate for one in found.tried if one.microseconds}
    assert timed == {"plain", "slow"}
    ratios = next(one.ratios for one in found.tried if one.candidate == "plain")
    assert set(ratios) == {1, 8} and max(ratios.values()) < 0.5
    for name in wrong:
        assert f"{key_of('planted', SHAPE)}: the candidate {name} is not used: it" in caplog.text
    assert "plain; the code's own choice is slow" in caplog.text


def test_candidates_that_crash_end_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: signals and exit codes by hand, and a sleep of a quarter of an hour; each is met once, and the search
    goes on without it.  The code's own choice is one of them, so the fastest right one is taken."""
    found = tune(tmp_path, monkeypatch, "segfault,exit,hang", own="wrong", silence_s=4.0)
    assert verdicts(found) == {
        "segfault": "it ended its process, code -11",
        "exit": "it ended its process, code 0",
        "hang": "it gave no answer for 4 s",
        "slow": RIGHT,
        "plain": RIGHT,
    }
    assert found.choice == ((MANY, "plain"),)
    assert "the candidate segfault is not used" in caplog.text


def test_an_own_choice_that_is_late_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the rule: a kernel that compiles for long on a busy machine is not wrong, so a start does not end for it;
    the log says that it is not proven."""
    found = tune(tmp_path, monkeypatch, "hang,nan", own="none", silence_s=3.0)
    assert found.choice == ((MANY, "hang"),)
    assert verdicts(found)["hang"] == NOT_REACHED and "it is wrong" in verdicts(found)["nan"]
    assert found.is_usable(found.choice)
    assert "no candidate was proven, so the code's own choice, which gave no answer in time: hang" in caplog.text


def test_none_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the rule; the message names the product, the candidates with their faults, and the remedy."""
    with pytest.raises(
        NoRightKernelError, match=r"planted in=256 out=96 is right .*nan: it is wrong.*raises: it failed.*--tune off"
    ):
        tune(tmp_path, monkeypatch, "nan,raises", own="none")


def test_the_time_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a budget that a process cannot begin in; the code's own choice stays, and is marked."""
    found = tune(tmp_path, monkeypatch, "", own="slow", budget_s=0.05)
    assert found.choice == ((MANY, "slow"),)
    assert set(verdicts(found).values()) == {NOT_REACHED}


@dataclass
class SlowTrials:
    """A process that needs ``seconds`` of a clock of its own for each candidate, and its lines; nothing else runs."""

    seconds: float
    now: float = 0.0
    names: tuple[str, ...] = ("slow", "plain")

    @contextmanager
    def lines(self, search: tuner._Search, left: list[int], orphan_s: float) -> Iterator[tuple[Any, Any]]:
        self._said = self._of(len(left))
        yield self, Mock(wait=lambda: 0)

    def _of(self, num_shapes: int) -> Iterator[Said]:
        for index in range(num_shapes):
            yield from (Said(index=index, candidate=name) for name in self.names)
            tried = tuple(Tried(candidate=name, verdict=RIGHT) for name in self.names)
            yield Said(index=index, choice=((MANY, "plain"),), all_tried=tried)

    def read(self, limit_s: float) -> bytes | None:
        if self.seconds > limit_s:
            self.now += max(0.0, limit_s)
            return None
        self.now += self.seconds
        said = next(self._said, None)
        return b"" if said is None else msgspec.json.encode(said)


def test_quick_ends_after_20_seconds_and_later_starts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: a clock of the test's own.  Thirty products, of none of which anything is known, and candidates that
    nearly reach the limit of each: a start takes 20 s, says what it has not reached, and the next one goes on there."""
    monkeypatch.syspath_prepend(tmp_path)
    trials = SlowTrials(1.9)
    monkeypatch.setattr(tuner._Search, "_lines", lambda *given: trials.lines(*given))
    monkeypatch.setattr(tuner, "time", Mock(monotonic=lambda: trials.now))
    wanted = [WantedShape(operation="planted", shape={**SHAPE, "in": 64 * (30 - one)}) for one in range(30)]
    places, known, done = {"planted": make_place(tmp_path, "", own="slow")}, dict[str, TunedShape](), []
    for number in range(1, 5):
        began_s, left = trials.now, [one for one in wanted if one.key not in known or known[one.key].is_open]
        with caplog.at_level(logging.INFO):
            caplog.clear()
            found = Tuner(device=CPU, places=places).tune(left, known)
        known |= {one.key: one for one in found}
        assert trials.now - began_s <= 20.0
        done.append(sum(not one.is_open for one in known.values()))
        [told] = [record.getMessage() for record in caplog.records]
        assert told.startswith(f"of {len(left)} shapes, {30 - done[-1]} are left") and "after 20 s: planted in=" in told
        assert {one.starts for one in known.values() if one.is_open} == {number}
    assert done == [3, 6, 9, 12]
    first = [one.key for one in wanted[:2]]
    assert all(not known[key].is_open for key in first)  # the largest


def test_a_product_that_takes_a_whole_start_lets_others_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same clock; the first product never ends, and those behind it come at the second start."""
    monkeypatch.syspath_prepend(tmp_path)
    trials = SlowTrials(7.0)
    monkeypatch.setattr(tuner._Search, "_lines", lambda *given: trials.lines(*given))
    monkeypatch.setattr(tuner, "time", Mock(monotonic=lambda: trials.now))
    wanted = [WantedShape(operation="planted", shape={**SHAPE, "in": size}) for size in (256, 64)]
    places = {"planted": make_place(tmp_path, "", own="slow")}
    first = Tuner(device=CPU, places=places).tune(wanted)
    assert [one.cuts for one in first] == [1, 0] and all(one.is_unknown for one in first)
    trials.seconds = 6.0
    second = Tuner(device=CPU, places=places).tune(wanted, {one.key: one for one in first})
    assert [one.is_open for one in second] == [True, False] and [one.starts for one in second] == [2, 2]
