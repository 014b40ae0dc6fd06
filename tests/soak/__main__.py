"""``python -m tests.soak --minutes 10 --ranks 8``: the soak, a report, and one JSON line.

::

    schedules         the scheduler alone, with a host tier, until ``--moves`` blocks have moved
    kills             ``--disk-kills`` engines with a disk tier, on at most two ranks, each killed at a random moment
    quiet life        the reference: greedy tokens of every prompt, without a host tier
    disturbed life    three fifths of the time: random load, pauses, sleeps, memory sampled; with a host tier
    fatal lives       at least one of each kind, for the rest of the time: each loses a rank; all in this process
    quiet life        the same tokens as at first

The lives are left out with ``--minutes 0``.  With ``--hosts``, half of the ranks on each of two hosts: ``hosts.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak import disk_kills
from tests.soak.hosts import RSS_ALLOWANCE, soak_hosts
from tests.soak.lives import Soak, check_process, disturbed_life, fatal_life, findings, quiet_life
from tests.soak.schedules import many_moves
from tests.tiny_models import make_checkpoint
from tp_engine.system.log import configure_logging

FATAL_KINDS = ("kill", "raise", "stop", "exit", "oom")
_DISTURBED_SHARE = 0.6


def run(
    soak: Soak, *, seconds: float, least: Counter[str] | None = None, fatal_kinds: Sequence[str] = FATAL_KINDS
) -> None:
    """Run all lives; raises at the first violation.  Each of ``fatal_kinds`` occurs at least once, and each event in
    ``least`` at least that often, however long that takes."""
    deadline_s = time.monotonic() + seconds
    quiet_life(soak)
    disturbed_life(soak, seconds * _DISTURBED_SHARE, least=least or Counter(), most_steps=int(40 * seconds))
    soak.usage.check(RSS_ALLOWANCE)
    for number, kind in enumerate(itertools.cycle(fatal_kinds)):
        if number >= len(fatal_kinds) and time.monotonic() >= deadline_s:
            break
        fatal_life(soak, kind)
    quiet_life(soak)
    check_process(soak)


def _disk_kills(scratch: Path, num_kills: int, num_ranks: int, seed: int) -> Counter[str]:
    folder, lines = make_checkpoint(scratch / "killed", "qwen3", **disk_kills.MODEL), scratch / "kills"
    lines.mkdir()
    return disk_kills.disk_kills(folder, lines, num_kills, num_ranks=num_ranks, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns exit code 0, or 1 after a violation."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time; printed in the report")
    parser.add_argument("--check-every-s", type=float, default=5.0, help="time between two checks of an idle engine")
    parser.add_argument(
        "--moves", type=int, default=100_000, help="blocks that move in the schedules (default: 100000)"
    )
    parser.add_argument("--disk-kills", type=int, default=20, help="engines with a disk tier that are killed")
    parser.add_argument("--fatal", nargs="+", default=FATAL_KINDS, choices=FATAL_KINDS, help="how ranks are lost")
    parser.add_argument("--hosts", action="store_true", help="over two hosts, without lost ranks: see test_faults")
    options = parser.parse_args(argv)
    configure_logging("soak")
    started_s, violation = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="tp_engine-soak-") as scratch:
        folder = make_checkpoint(Path(scratch) / "model", "qwen3", num_heads=8, num_kv_heads=8)
        if options.hosts:
            return _over_hosts(folder, options)
        soak = Soak(folder, Path(scratch) / "flight", options.ranks, options.seed, options.check_every_s)
        try:
            soak.count += many_moves(options.moves, options.seed)
            if options.disk_kills:
                soak.count += _disk_kills(Path(scratch), options.disk_kills, min(2, options.ranks), options.seed)
            if options.minutes:
                run(soak, seconds=60 * options.minutes, fatal_kinds=options.fatal)
        except Exception as error:
            traceback.print_exc()
            violation = f"{type(error).__name__}: {error}"
    _show(findings(soak, violation, time.monotonic() - started_s))
    return 0 if violation is None else 1


def _over_hosts(folder: Path, options: argparse.Namespace) -> int:
    given = {"num_ranks": options.ranks, "seed": options.seed, "check_every_s": options.check_every_s}
    _show(soak_hosts(folder, seconds=60 * options.minutes, **given))
    return 0


def _show(report: Mapping[str, object]) -> None:
    for name, value in report.items():
        print(f"{name:30} {value}")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
