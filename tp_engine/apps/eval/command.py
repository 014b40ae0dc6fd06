"""``tp-engine eval MODEL``: are as many answers right as must be?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.judging import Reference
from tp_engine.apps.eval.options import EvalConfig
from tp_engine.apps.eval.run import PROGRAM, Demands, evaluate
from tp_engine.apps.gates.report import EXIT_UNDECIDED, GateReport, make_folder
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.errors import ConfigError, printable
from tp_engine.options import Options, parse_options
from tp_engine.server.config import SERVE_TABLES, ServerConfig
from tp_engine.system import env
from tp_engine.system.log import configure_logging

_DESCRIPTION = (
    "Does a model answer as many questions right as it must?  Exit code 0: yes, 1: fewer, and chance does not explain "
    "it, 2: it cannot be told.  Takes the options of tp-engine serve, whose server it starts; --url asks a running one."
)


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
