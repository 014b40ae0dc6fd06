"""``tp-engine doctor``: what this machine has, what is missing, and what the engine would choose on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tp_engine.apps.doctor.findings import Finding, Status, as_screen, as_text, check_packages
from tp_engine.config import DEMO_MODEL
from tp_engine.job.shown_progress import shown_progress
from tp_engine.options import parse_options
from tp_engine.options.fields import checked, option
from tp_engine.system.log import configure_logging
from tp_engine.system.version import __version__

SOMETHING_MISSING = 1


@checked()
@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The model to choose for."""

    model: str = option(
        str(DEMO_MODEL), "model to choose for (default: the demo model of this project)", positional=True
    )
    tensor_parallel_size: int = option(1, "number of ranks to choose for", flags=("-tp", "--tp-size"))
    verbose: bool = option(False, "print all that was found, in whole lines", flags=("-v",))
    json: bool = option(False, "print JSON")


def main(argv: Sequence[str]) -> int:
    """Print the findings; 1 if something needed is missing."""
    options = parse_options("tp-engine doctor", "What this machine has.", {"doctor": DoctorConfig}, argv)
    config = options.build("doctor", DoctorConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    configure_logging("doctor")  # a first start compiles the kernels, and says how far it is
    with shown_progress():
        findings = list(examine(config))
    missing = [one for one in findings if one.status is Status.MISSING]
    if config.json:
        content = {"version": __version__, "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps(content | {"ok": not missing}, indent=2))
    else:
        print(f"tp-engine {__version__}: what will be fast here, what slow, and why")
        print(as_text(findings) if config.verbose else as_screen(findings))
        print("something needed is missing" if missing else "nothing needed is missing")
    return SOMETHING_MISSING if missing else 0


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Yield all findings, packages first: the other checks need them."""
    packages = list(check_packages())
    yield from packages
    if any(one.status is Status.MISSING for one in packages):
        return
    from tp_engine.apps.doctor.machine import check_machine

    yield from check_machine(config.model, config.tensor_parallel_size)
