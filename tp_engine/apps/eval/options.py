"""The options of ``tp-engine eval``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.apps.eval.run import find_task
from tp_engine.apps.eval.tasks import HarnessTask, Task, shipped_tasks
from tp_engine.apps.gates.report import parse_share
from tp_engine.errors import ConfigError, shown
from tp_engine.options.fields import checked, json_object, option


def _sampling(given: Any) -> dict[str, Any]:
    return json_object("sampling", given, example='{"temperature": 0.6, "seed": 1}')


@checked()
@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to ask, what must hold, and where the report goes."""

    url: str | None = option(
        None, "a running server with OpenAI's API, of any engine: http://localhost:8000", section="Evaluation"
    )
    tasks: tuple[str, ...] = option(
        (),
        f"what to ask: {', '.join(shipped_tasks())}, files of questions (.jsonl), or tasks of lm-eval "
        "(tp-engine[eval]); default: word_problems, for the demo model sums",
    )
    threshold: tuple[str, ...] = option(
        (), "the least share of right answers, such as 90%, or TASK=90% for one task; several"
    )
    record: str | None = option(None, "file for all answers, to compare later runs with")
    against: str | None = option(
        None, "file that --record wrote: fail if more of its questions are wrong than right now"
    )
    force: bool = option(False, "compare with --against although the questions, or how they are asked, differ")
    limit: int | None = option(None, "ask only this many questions of each task", least=1)
    num_fewshot: int | None = option(
        None,
        "show as many questions with their solutions first (default: 0; lm-eval's tasks say it themselves)",
        least=0,
    )
    include_path: str | None = option(None, "folder with more tasks of lm-eval's (YAML)")
    completions: bool = option(False, "send prompts as they are, without the model's chat template")
    sampling: Mapping[str, Any] | None = option(
        None, "JSON object of further fields of every request (default: temperature 0)", json=_sampling
    )
    concurrency: int = option(32, "questions under way at a time", least=1, most=1024)
    json: bool = option(False, "print JSON")
    junit: str | None = option(None, "file for the report as JUnit's XML")
    markdown: str | None = option(None, "file for the report as Markdown; $GITHUB_STEP_SUMMARY gets it by itself")

    def __post_init__(self) -> None:
        _ = self.thresholds
        if self.force and self.against is None:
            raise ConfigError("force is for a comparison with --against; leave it out, or give the reference")

    @property
    def thresholds(self) -> dict[str, float]:
        """The least shares by task; that of all tasks under an empty name."""
        found = {}
        for text in self.threshold:
            task, _, share = text.rpartition("=")
            found[task] = parse_share("threshold", share)
        return found

    def loaded_tasks(self, default: str) -> list[Task | HarnessTask]:
        """The tasks, each once; ``ConfigError`` for one that is unknown, and for a threshold of one that is not
        asked."""
        tasks = [find_task(name, self.include_path) for name in dict.fromkeys(self.tasks or (default,))]
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise ConfigError(f"tasks are {', '.join(self.tasks)}; two have the same name: rename one of the files")
        if strange := sorted(self.thresholds.keys() - {"", *names}):
            raise ConfigError(f"threshold names {shown(strange[0])}; asked are {', '.join(names)}")
        return tasks
