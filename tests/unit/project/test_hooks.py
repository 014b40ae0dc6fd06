"""Hooks of optional features have types: a misspelled one is an error of the start, and of mypy."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tp_engine.features.registry import features as all_features
from tp_engine.features.registry import load
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.features import make_features as _runner_features  # noqa: F401 - defines all features
from tp_engine.worker.results.layer_watch import LayerWatch  # noqa: F401 - the one that an order makes

for feature in all_features():  # defines the kinds that are made
    for half in filter(None, (feature.scheduler, feature.rank, feature.runner, feature.engine)):
        load(half)

ROOT = Path(__file__).parents[3]
MISSPELLED = """
from tp_engine.plan import StepPlan, StepResult
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks

class Mine(SchedulerFeature):
    def attach(self, hooks: SchedulerHooks) -> None:
        {line}

    def on_result(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        return plan, result

Mine().attach(SchedulerHooks())
for hook in SchedulerHooks().on_result:
    pass
"""


def features(base: type[Any]) -> list[type[Any]]:
    return [kind for kind in base.__subclasses__() if kind.__module__.startswith("tp_engine.")]


@pytest.mark.parametrize(
    ("kind", "hooks"),
    [(kind, SchedulerHooks) for kind in features(SchedulerFeature)]
    + [(kind, RunnerHooks) for kind in features(RunnerFeature)],
    ids=lambda value: value.__name__,
)
def test_a_feature_attaches_all_that_it_defines(kind: type[Any], hooks: type[Any]) -> None:
    """Oracle: the feature's methods that have the name of a hook."""
    names = {field.name for field in dataclasses.fields(hooks)}
    defined = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name in names}
    made, feature = hooks(), object.__new__(kind)
    kind.attach(feature, made)
    attached = {name: [one.__name__.lstrip("_") for one in getattr(made, name)] for name in names}
    assert {name for name, found in attached.items() if found} >= defined
    assert {name: found for name, found in attached.items() if found not in ([], [name])} == {}


@pytest.mark.parametrize(
    ("line", "error"),
    [("hooks.on_result.append(self.on_result)", None), ("hooks.on_reslt.append(self.on_result)", "on_reslt"),
     ("hooks.on_result.append(self.on_reslt)", "on_reslt")],
)  # fmt: skip
def test_a_misspelled_hook_is_an_error_of_the_start(line: str, error: str | None) -> None:
    """Oracle: Python's own error, which names it."""
    program = MISSPELLED.format(line=line)
    if error is None:
        exec(program, {"__name__": "mine"})
        return
    with pytest.raises(AttributeError, match=error):
        exec(program, {"__name__": "mine"})


def test_a_hook_that_is_not_there_can_not_be_called() -> None:
    """By hand: the caller's side."""
    for hooks in (SchedulerHooks(), RunnerHooks()):
        with pytest.raises(AttributeError, match="on_resutl"):
            hooks.on_resutl  # type: ignore[union-attr]  # noqa: B018


@pytest.mark.slow
def test_a_misspelled_or_wrong_hook_is_an_error_of_mypy(tmp_path: Path) -> None:
    """Oracle: mypy with the project's settings: the name, the caller's name, another signature."""
    lines = ["hooks.on_reslt.append(self.on_result)", "hooks.on_result.append(self.on_reslt)",
             "hooks.on_add.append(self.on_result)", "hooks.on_result.append(self.on_result)"]  # fmt: skip
    files = [tmp_path / f"feature_{number}.py" for number in range(len(lines) + 1)]
    for file, line in zip(files, lines, strict=False):
        file.write_text(MISSPELLED.format(line=line), encoding="utf-8")
    files[-1].write_text(MISSPELLED.format(line=lines[-1]).replace("().on_result:", "().on_resutl:"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "setup.cfg"), *map(str, files)],
        capture_output=True, text=True, cwd=ROOT, timeout=600,
    )  # fmt: skip
    wrong = {line.partition(":")[0].rpartition("/")[2] for line in done.stdout.splitlines() if ": error:" in line}
    assert wrong == {"feature_0.py", "feature_1.py", "feature_2.py", "feature_4.py"}, done.stdout + done.stderr
