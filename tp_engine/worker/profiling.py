"""What profilers see of a step: traces of chosen steps in a file per rank, and named parts of every step on CUDA.

``--profile FOLDER`` records steps ``--profile-steps FIRST:END`` (END not included; steps count from 1, on all ranks
alike) with torch.profiler; a server's ``/start_profile`` and ``/stop_profile`` record the steps between them.
Nsight Systems shows the names through NVTX, without any option.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias, TypeVar, TypeVarTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tp_engine.config import EngineConfig
from tp_engine.cpu import naming_calls
from tp_engine.errors import ConfigError
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Given = TypeVarTuple("Given")
Found = TypeVar("Found")

Named: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""``with named("model"):`` gives a part of a step its name."""


def names_for(device_type: str) -> Named | None:
    """NVTX ranges on CUDA; None elsewhere."""
    return torch.cuda.nvtx.range if device_type == "cuda" else None


def run_part(named: Named | None, name: str, part: Callable[[*Given], Found], *given: *Given) -> Found:
    """Run a part of a step, under its ``name`` if parts are ``named``."""
    if named is None:
        return part(*given)
    with named(name):
        return part(*given)


def parse_steps(text: str) -> range:
    """``'10:20'`` -> steps 10 to 19, ``'none'`` -> no steps; ``ConfigError`` for anything else."""
    if text == "none":
        return range(0)
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()) or not 0 < int(first) < int(end):
        raise ConfigError(
            f"profile_steps is {text!r}; it must be FIRST:END, two numbers of steps that count from 1, such as 10:20 "
            "for ten steps, or none"
        )
    return range(int(first), int(end))


class StepProfiler:
    """Writes ``folder/rank<R>_steps<FIRST>-<LAST>.json.gz``, for chrome://tracing or ui.perfetto.dev.

    Creates the folder; raises ``OSError`` if that is not allowed.
    """

    def __init__(self, folder: Path, steps: range, rank: int, device_type: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._steps, self._rank = folder, steps, rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]
        self._trace: profile | None = None
        self._first = self._last = 0
        self._on_demand = False

    @contextmanager
    def step(self, step_id: int) -> Iterator[None]:
        """Trace the launch of one step, within, if it is to be recorded."""
        if self._trace is None and step_id in self._steps:
            self._begin()
        if self._trace is None:
            yield
            return
        with record_function(f"step {step_id}"), naming_calls(record_function):
            yield
        self._first, self._last = self._first or step_id, step_id
        if step_id + 1 not in self._steps and not self._on_demand:
            self._write()

    def start(self) -> None:
        """Record from the next step until ``stop``; a trace in progress continues until then."""
        self._on_demand = True
        if self._trace is None:
            self._begin()

    def stop(self) -> None:
        """Write what has been recorded, if anything."""
        self._on_demand = False
        self._write()

    def close(self) -> None:
        """Write what has been recorded, if steps ended before ``END``; safe to call again."""
        if self._trace is None and self._last == 0 and self._steps:
            logger.warning("no trace: the engine ended before step %d", self._steps.start)
        self._write()

    def _begin(self) -> None:
        self._first = 0
        self._trace = profile(activities=self._activities)
        self._trace.start()

    def _write(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()  # waits for the device
        if self._first == 0:
            logger.warning("no trace: no step ran while it was to be recorded")
            return
        path = self._folder / f"rank{self._rank}_steps{self._first}-{self._last}.json.gz"
        trace.export_chrome_trace(str(path))
        logger.info("wrote the trace of steps %d to %d to %s", self._first, self._last, path)

    @property
    def is_recording(self) -> bool:
        """Whether a trace has begun and is not written yet."""
        return self._trace is not None

    def named(self, otherwise: Named | None) -> Named:
        """Names for the trace while one is recorded, else for ``otherwise``."""
        names = nullcontext if otherwise is None else otherwise
        return lambda name: record_function(name) if self.is_recording else names(name)


def make_step_profiler(config: EngineConfig, rank: int) -> StepProfiler | None:
    """Return this rank's profiler, if ``config`` asks for one; ``OSError`` if the folder of traces cannot be made."""
    if config.profile is None:
        return None
    return StepProfiler(Path(config.profile), parse_steps(config.profile_steps), rank, config.device)
