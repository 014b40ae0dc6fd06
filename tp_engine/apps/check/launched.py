"""``torchrun --nproc-per-node 8 -m tp_engine check``: the ranks check their machine, then rank 0 a model."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.apps.check.report import EXIT_WRONG, CheckFinding, CheckReport, describe_environment
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.errors import RankError
from tp_engine.options import Options
from tp_engine.options.fields import checked, option
from tp_engine.options.launch import run_launched
from tp_engine.system import env
from tp_engine.system.log import configure_logging

_LAST_WORDS_S = 8.0


@checked()
@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """What the ranks of a torchrun job check, and where they write it."""

    only: str | None = option(None, "check this alone (default: the machine, then the model)", choices=("machine",))
    json: bool = option(False, "print JSON")
    junit: str | None = option(None, "file for the findings as JUnit's XML")
    quick: bool = option(False, "fewer prompts and set-ups for the model")
    limit_s: float = option(120.0, "after so long without progress the check ends and names the rank", positive=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Check on this rank; returns the exit code, the same on all ranks that end by themselves."""
    return run_launched("tp-engine check", __doc__, {"engine": EngineConfig, "check": RanksConfig}, check_job, argv)


def check_job(options: Options) -> int:
    """Check the machine on all ranks; rank 0 goes on with the model, and reports."""
    launched, config = env.launched_rank(), options.build("check", RanksConfig)
    rank, world_size = (launched.rank, launched.world_size) if launched else (0, 1)
    limits = {"startup_timeout_s": config.limit_s, "collective_timeout_s": config.limit_s}
    engine = EngineConfig(**limits | options.given["engine"])
    signal.signal(signal.SIGTERM, lambda *_: _end_after(_LAST_WORDS_S))
    findings: list[CheckFinding] = []
    doing = ["starting"]
    writer = 0
    try:
        from tp_engine.apps.check.machine import check_machine  # torch

        for finding in check_machine(engine, world_size, lambda what: doing.__setitem__(0, what)):
            findings.append(finding)
            if rank == 0:
                print(f"{finding.status.value}: {finding.name}", file=sys.stderr, flush=True)
    except RankError as error:
        findings.append(
            CheckFinding.wrong(
                "ranks",
                f"{error}; the others were at: {doing[0]}",
                place=f"rank {error.rank}",
                meaning="a job on these ranks ends there, or waits for ever",
                remedy="the log above has the stacks of all ranks; --limit-s gives slow ones more time",
            )
        )
        writer = 1 if error.rank == 0 else 0
    report = CheckReport(
        subject=f"{world_size} ranks of this machine", findings=tuple(findings), environment=describe_environment()
    )
    if rank == 0 and config.only is None and report.exit_code != EXIT_WRONG:
        report = _with_model(report, {**options.given["engine"], "tensor_parallel_size": world_size}, config.quick)
    if rank == writer:
        write(report, config)
    return report.exit_code


def _with_model(report: CheckReport, options: Mapping[str, Any], quick: bool) -> CheckReport:
    """Check the model as ``tp-engine check MODEL -tp N`` does, with ranks of its own; the others have ended by then."""
    from tp_engine.apps.check.engine_check import EngineCheck

    env.leave_launch()
    env.log_warnings_only()
    configure_logging("check")
    model = {"model": str(DEMO_MODEL), **options}
    found, _ = EngineCheck(options=model, quick=quick, note=lambda text: print(text, file=sys.stderr, flush=True)).run()
    return CheckReport(
        subject=f"{report.subject}, and {found.subject}",
        findings=(*report.findings, *found.findings),
        environment={**report.environment, **found.environment},
    )


def write(report: CheckReport, config: RanksConfig) -> None:
    """Print the report, and write JUnit's file."""
    print(report.as_json() if config.json else report.as_text(), flush=True)
    if config.junit is not None:
        path = Path(config.junit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.as_junit(), encoding="utf-8")


def _end_after(seconds: float) -> None:
    """torchrun ends all ranks as soon as one has ended; the others may still say which one, and why."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
