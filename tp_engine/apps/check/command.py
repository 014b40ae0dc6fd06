"""``tp-engine check MODEL``: are this machine's answers right?"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tp_engine.apps.check import launched
from tp_engine.apps.check.report import CheckReport
from tp_engine.apps.gates.report import make_folder
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options import Options, parse_options
from tp_engine.options.fields import checked, option
from tp_engine.server.config import SERVE_TABLES, ServerConfig
from tp_engine.system import env
from tp_engine.system.log import configure_logging

_DESCRIPTION = (
    "Is what this machine answers right?  Runs the model as it would be served, and compares it with transformers in "
    "float32.  Exit code 0: right, 1: wrong, 2: it could not be checked.  Takes the options of tp-engine serve."
)
# Options of the server on how chats become prompts.
_DEFAULTS = ("generation_config", "override_generation_config")
_OF_ENGINES = ("bisect", "record", "against")


@checked()
@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check, with what, and where the findings go."""

    url: str | None = option(
        None, "a running server, of any engine, that should serve the model: http://localhost:8000", section="Check"
    )
    quick: bool = option(False, "fewer prompts and set-ups: for a first look, and for jobs that must be short")
    reference: str | None = option(None, "folder of the checkpoint that is right (default: the model itself)")
    oracle_device: str = option("cpu", "device of the oracle, such as cuda:0")
    bisect: bool = option(False, "if something is wrong, switch options off one at a time and say which one mends it")
    record: str | None = option(None, "file for the answers, to compare another machine or version with")
    against: str | None = option(None, "file that --record wrote: compare with it too")
    json: bool = option(False, "print JSON")
    junit: str | None = option(None, "file for the findings as JUnit's XML")

    def __post_init__(self) -> None:
        if self.url is not None and (mixed := [name for name in _OF_ENGINES if getattr(self, name)]):
            raise ConfigError(f"{mixed[0]} is for a model that runs here; leave it out, or leave url out")

    def make_folders(self) -> None:
        """Make the folders of the files that are written at the end; ``ConfigError`` where one cannot be made."""
        for name in ("record", "junit"):
            make_folder(name, getattr(self, name))


def main(argv: Sequence[str]) -> int:
    """Check, print the report, and return its exit code; under torchrun each rank checks the machine first."""
    if env.launched_rank() is not None:
        return launched.main(argv)
    options = parse_options("tp-engine check", _DESCRIPTION, {**SERVE_TABLES, "check": CheckConfig}, argv)
    config = options.build("check", CheckConfig)
    engine = options.build("engine", EngineConfig)
    server = options.build("server", ServerConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    config.make_folders()
    env.log_warnings_only()
    configure_logging("check")
    check = _check if config.url is None else _check_url
    report = check(options, config, engine, server)
    print(report.as_json() if config.json else report.as_text(), flush=True)
    if config.junit is not None:
        Path(config.junit).write_text(report.as_junit(), encoding="utf-8")
    return report.exit_code


def _check(options: Options, config: CheckConfig, engine: EngineConfig, server: ServerConfig) -> CheckReport:
    from tp_engine.apps.check import golden
    from tp_engine.apps.check.bisect import bisect
    from tp_engine.apps.check.engine_check import EngineCheck

    known = None if config.against is None else golden.read_golden(Path(config.against))
    given: dict[str, Any] = {"model": engine.model, **options.given["engine"]}
    given |= {name: getattr(server, name) for name in _DEFAULTS if name in options.given["server"]}
    with tqdm(desc="check", unit=" steps", file=sys.stderr, disable=None, leave=False) as bar:

        def note(text: str) -> None:
            bar.set_description(text)
            bar.update()

        check = EngineCheck(
            options=given,
            chats=server,
            quick=config.quick,
            reference=config.reference,
            oracle_device=config.oracle_device,
            note=note,
            note_layer=bar.update,
        )
        report, seen = check.run()
        findings = list(report.findings)
        if seen is not None and known is not None:
            findings += golden.compare(
                known, check.folder, seen.alone, bound=seen.bound, environment=report.environment
            )
        if seen is not None and config.record is not None:
            text = golden.golden_content(
                report.subject,
                check.folder,
                seen.alone,
                bound=seen.bound,
                environment=report.environment,
                options=given,
            )
            Path(config.record).write_text(text, encoding="utf-8")
        report = dataclasses.replace(report, findings=tuple(findings))
        if seen is not None and config.bisect:
            found = bisect(check, report, seen.configuration, note)
            report = dataclasses.replace(report, findings=(*report.findings, *found))
    return report


def _check_url(options: Options, config: CheckConfig, engine: EngineConfig, server: ServerConfig) -> CheckReport:
    from tp_engine.apps.check.url_check import ENGINE_OPTIONS, UrlCheck

    if foreign := sorted(options.given["engine"].keys() - {"model", *ENGINE_OPTIONS}):
        raise ConfigError(f"{foreign[0]} is for a model that runs here; leave it out, or leave url out")
    with tqdm(desc="check", unit=" steps", file=sys.stderr, disable=None, leave=False) as bar:
        return UrlCheck(
            url=config.url or "",
            model=config.reference or engine.model,
            name=next(iter(server.served_model_name), None),
            api_key=next(iter(server.api_key), env.API_KEY.read() or None),
            quick=config.quick,
            oracle_device=config.oracle_device,
            note=lambda text: bar.set_description(text),
            note_layer=bar.update,
            **{name: getattr(engine, name) for name in ENGINE_OPTIONS if name in options.given["engine"]},
        ).run()
