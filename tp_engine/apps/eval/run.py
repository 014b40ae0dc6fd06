"""Runs tasks against a server and makes the report; the command and the pytest fixture share it."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tqdm import tqdm

from tp_engine.api.server_client import ServerError
from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.judging import EvalOutcome, Reference, TaskResult, reference_line, share_line
from tp_engine.apps.eval.tasks import HarnessTask, Task, load_task, shipped_tasks
from tp_engine.apps.gates.report import GateLine, GateReport, GateVerdict

PROGRAM = "tp-engine eval"


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What must hold: ``thresholds`` by task, or for all under an empty name, and an earlier run."""

    thresholds: Mapping[str, float]
    reference: Reference | None = None
    force: bool = False

    def lines(self, result: TaskResult) -> list[GateLine]:
        """The lines of a task."""
        threshold = self.thresholds.get(result.name, self.thresholds.get(""))
        lines = [share_line(result, threshold)]
        if self.reference is not None:
            lines.append(reference_line(result, self.reference, force=self.force))
        return lines


def find_task(name: str, include_path: str | None) -> Task | HarnessTask:
    """Return the task ``name``: ours, or one of lm-eval's where this is installed; raises ``ConfigError``."""
    if name.endswith(".jsonl") or name in shipped_tasks() or importlib.util.find_spec("lm_eval") is None:
        return load_task(name)
    from tp_engine.apps.eval import harness

    harness.find(name, include_path)
    return HarnessTask(name, include_path)


def evaluate(
    asker: Asker,
    tasks: Sequence[Task | HarnessTask],
    demands: Demands,
    *,
    subject: str,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> GateReport:
    """Ask all questions; a task that cannot be asked is a line that says why, and the others go on."""
    lines: list[GateLine] = []
    results: list[TaskResult] = []
    for task in tasks:
        try:
            if isinstance(task, HarnessTask):
                from tp_engine.apps.eval import harness

                result = harness.ask(asker, task, num_fewshot=num_fewshot, limit=limit)
            else:
                result = ask_task(asker, task, num_fewshot=num_fewshot or 0, limit=limit)
        except ServerError as error:
            lines.append(
                GateLine(name=task.name, verdict=GateVerdict.UNDECIDED, measured=f"could not be asked: {error}")
            )
            continue
        results.append(result)
        lines += demands.lines(result)
    content = {"tasks": [msgspec.to_builtins(result) for result in results]}  # what --against reads
    return GateReport(program=PROGRAM, subject=subject, lines=lines, content=content)


def ask_task(asker: Asker, task: Task, *, num_fewshot: int, limit: int | None) -> TaskResult:
    """Ask the questions of a task, several at a time; raises ``ServerError``."""
    examples, asked = task.limited(limit, num_fewshot)
    began_s = time.monotonic()
    answers = asker.ask_all(lambda question: asker.answer(question, examples), asked.questions)
    shown = tqdm(
        answers, task.name, len(asked.questions), unit=" questions", file=sys.stderr, disable=None, leave=False
    )
    outcomes = [
        EvalOutcome(question.id, question.is_right(answer), answer)
        for question, answer in zip(asked.questions, shown, strict=True)
    ]
    return TaskResult(
        name=task.name,
        digest=asked.digest,
        settings=settings_of(asker, num_fewshot),
        outcomes=outcomes,
        seconds=time.monotonic() - began_s,
    )


def settings_of(asker: Asker, num_fewshot: int) -> dict[str, Any]:
    """What decides, beside the questions, how they are asked."""
    return {"chat": asker.as_chat, "num_fewshot": num_fewshot, "sampling": dict(asker.sampling)}
