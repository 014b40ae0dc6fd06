"""``tp-engine steps FILE`` and ``python -m tp_engine.job.flight_recorder FILE``: print a flight record for people."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_engine.errors import ConfigError
from tp_engine.job.flight_recorder.record import BadRecordError, FlightRecord, load_record
from tp_engine.job.flight_recorder.report import report_lines
from tp_engine.job.flight_recorder.steps import slowest_lines, step_lines
from tp_engine.options import parse_options
from tp_engine.options.fields import checked, option


@checked()
@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """The record, and what to print of it."""

    file: str = option("", "tp_engine-flight-*.json, or an answer of /debug/flight_record; --file may be left out")
    steps: int = option(8, "how many of the last steps to print", least=0)
    slowest: int | None = option(None, "print this many of the slowest steps, beside those like them", least=1)
    step: int | None = option(None, "print what happened in the step of this number", least=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a file that is not a record."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--file")
    options = parse_options("tp-engine steps", "Print a flight record for people.", {"steps": StepsConfig}, arguments)
    config = options.build("steps", StepsConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    if not config.file:
        raise ConfigError("file is missing: give a flight record, such as /tmp/tp_engine-flight-...json")
    try:
        record = load_record(Path(config.file))
    except BadRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print("\n".join(_lines(record, config)), flush=True)
    except BrokenPipeError:  # the reader, such as ``head``, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _lines(record: FlightRecord, config: StepsConfig) -> list[str]:
    if config.slowest is None and config.step is None:
        return report_lines(record, num_steps=config.steps)
    slowest = [] if config.slowest is None else slowest_lines(record, config.slowest)
    return [*slowest, *([] if config.step is None else step_lines(record, config.step))]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
