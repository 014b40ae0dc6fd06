"""``tp-engine tune MODEL``: prove and time the kernels that a model needs, and say what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.job.shown_progress import shown_progress
from tp_engine.options import parse_options
from tp_engine.options.fields import checked, option
from tp_engine.system.log import configure_logging

if TYPE_CHECKING:
    from tp_engine.worker.tuning.table import TunedTable

EXIT_FAULTS = 3
_DESCRIPTION = (
    "Proves and times the kernels of a model on this device; engines that start later find the choice.  Exit code 0: "
    "done, 3: a kernel was wrong or crashed, and is not used, 1: none is right.  Takes the options of the engine."
)


@checked()
@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How much to try, and where the findings go."""

    quick: bool = option(False, "only what a start with --tune quick tries, in 20 s", section="Tune")
    again: bool = option(False, "try all kernels anew, also those that are known on this device")
    report: bool = option(False, "print the whole table, which names no path, host or model: send it to us")
    to: str | None = option(None, "file for the choices, which --tuned takes")

    def check_folder(self) -> None:
        """Raise ``ConfigError`` if ``to`` cannot be written."""
        if self.to is not None and not Path(self.to).absolute().parent.is_dir():
            raise ConfigError(f"to is {self.to!r}, whose folder does not exist: make it, or give another file")


def main(argv: Sequence[str]) -> int:
    """Try the kernels, print what was found, and return the exit code."""
    options = parse_options("tp-engine tune", _DESCRIPTION, {"engine": EngineConfig, "tune": TuneConfig}, argv)
    config, engine = options.build("tune", TuneConfig), options.build("engine", EngineConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    if engine.tuned is not None or engine.tune != "auto":
        name = "tuned" if engine.tuned is not None else "tune"
        raise ConfigError(f"{name} is for engines; this command tries kernels: leave it out (--quick tries fewer)")
    config.check_folder()
    configure_logging("tune")
    from tp_engine.worker.tuning.report import as_report, as_summary
    from tp_engine.worker.tuning.table import write_pinned

    with shown_progress():
        table = _search(engine, quick=config.quick, again=config.again)
    print(as_report(table) if config.report else as_summary(table), flush=True)
    if config.to is not None:
        write_pinned(config.to, table)
        print(f"written to {config.to}", file=sys.stderr)
    return EXIT_FAULTS if any(one.is_fault for shape in table.shapes for one in shape.tried) else 0


def _search(engine: EngineConfig, *, quick: bool, again: bool) -> TunedTable:
    """What is known, or found now, of the shapes of a job: without its ranks, on the first one's device."""
    import torch

    from tp_engine.worker.effective_config import resolve
    from tp_engine.worker.tuning.shapes import wanted_shapes
    from tp_engine.worker.tuning.start import find_table

    effective = resolve(engine)
    device = torch.device(effective.config.device)
    if device.type == "cuda":
        device = torch.device("cuda", effective.device_map.indices[0])
    wanted = wanted_shapes(effective, device.type)
    return find_table(device, wanted, "quick" if quick else "full", again=again)
