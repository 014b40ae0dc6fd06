"""``python -m tp_engine.job.flight_recorder FILE``: print a flight record for people."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tp_engine.job.flight_recorder.record import BadRecordError, load_record
from tp_engine.job.flight_recorder.report import report_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a file that is not a record."""
    parser = argparse.ArgumentParser(prog="python -m tp_engine.job.flight_recorder", description=__doc__)
    parser.add_argument("file", type=Path, help="tp_engine-flight-*.json")
    parser.add_argument("--steps", type=int, default=8, help="how many of the last steps to print (default: 8)")
    options = parser.parse_args(argv)
    try:
        record = load_record(options.file)
    except BadRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print("\n".join(report_lines(record, num_steps=options.steps)), flush=True)
    except BrokenPipeError:  # the reader, such as ``head``, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
