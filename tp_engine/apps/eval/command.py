"""``tp-engine eval MODEL``: are as many answers right as must be?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.judging import Reference
from tp_engine.apps.eval.run import PROGRAM, Demands, evaluate, find_task
from tp_engine.apps.eval.tasks import HarnessTask, Task, shipped_tasks
from tp_engine.apps.gates.report import EXIT_UNDECIDED, GateReport, make_folder, parse_share
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.errors import ConfigError, printable, shown
from tp_engine.options import Options, parse_options
from tp_engine.options.fields import checked, json_object, option
from tp_engine.server.config import SERVE_TABLES, ServerConfig
from tp_engine.system import env
from tp_engine.system.log import configure_logging

_DESCRIPTION = (
    "Does a model answer as many questions right as it must?  Exit code 0: yes, 1: fewer, and chance does not explain "
    "it, 2: it cannot be told.  Takes the options of tp-engine serve, whose server it starts; --url asks a running one."
)


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


def main(argv: Sequence[str]) -> int:
    """Ask, print the report, and return its exit code."""
    options = parse_options(PROGRAM, _DESCRIPTION, {**SERVE_TABLES, "eval": EvalConfig}, argv)
    config = options.build("eval", EvalConfig)
    engine = options.build("engine", EngineConfig)
    server = options.build("server", ServerConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    for name in ("record", "junit", "markdown"):
        make_folder(name, getattr(config, name))
    is_demo = config.url is None and engine.model == str(DEMO_MODEL)
    tasks = config.loaded_tasks("sums" if is_demo else "word_problems")
    reference = None if config.against is None else Reference.read(config.against)
    demands = Demands(thresholds=config.thresholds, reference=reference, force=config.force)
    configure_logging("eval")
    try:
        with _client(options, config, server) as (client, wanted):
            asker = Asker(
                client=client,
                model=client.model(wanted),
                as_chat=not config.completions,
                sampling=config.sampling or {},
                concurrency=config.concurrency,
            )
            report = evaluate(
                asker,
                tasks,
                demands,
                subject=asker.model if config.url is None else f"{asker.model} at {client.url}",
                num_fewshot=config.num_fewshot,
                limit=config.limit,
            )
    except (ServerError, OSError, RuntimeError) as error:  # 1 would mean that answers are wrong
        print(printable(f"{PROGRAM}: error: {error}"), file=sys.stderr, flush=True)
        return EXIT_UNDECIDED
    return finish(report, config)


def finish(report: GateReport, config: EvalConfig) -> int:
    """Print and write the report; returns its exit code."""
    print(report.as_json() if config.json else report.as_text(), flush=True)
    if config.record is not None:
        Path(config.record).write_text(report.as_json() + "\n", encoding="utf-8")
    report.write(junit=config.junit, markdown=config.markdown)
    return report.exit_code


@contextlib.contextmanager
def _client(options: Options, config: EvalConfig, server: ServerConfig) -> Iterator[tuple[ServerClient, str | None]]:
    """A client of the running server, or of one that runs meanwhile, and the model's name there if one was given."""
    engine = options.given["engine"]
    if config.url is not None:
        if foreign := sorted(engine.keys() - {"model"}):
            raise ConfigError(f"{foreign[0]} is for a model that runs here; leave it out, or leave url out")
        key = next(iter(server.api_key), env.API_KEY.read() or None)
        wanted = engine.get("model") or next(iter(server.served_model_name), None)
        yield ServerClient(config.url, api_key=key), wanted
        return
    from tp_engine.apps.own_server import own_server

    with own_server(engine, options.given["server"]) as running:
        yield ServerClient(running.url, api_key=running.api_key), None
