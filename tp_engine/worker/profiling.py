"""What profilers see of a step: traces of chosen steps in a file per rank, and named parts of every step on CUDA.

``--profile FOLDER`` records steps ``--profile-steps FIRST:END`` (END not included; steps count from 1, on all ranks
alike) with torch.profiler; a server's ``/start_profile`` and ``/stop_profile`` record the steps between them.
Nsight Systems shows the names through NVTX, without any option.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tp_engine.config import EngineConfig
from tp_engine.cpu.kernels.tape import naming_calls
from tp_engine.errors import ConfigError
from tp_engine.log import get_logger

logger = get_logger(__name__)

Named: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""``with named("model"):`` gives a part of a step its name."""

_NOTHING = contextlib.nullcontext()


def unnamed(_name: str) -> AbstractContextManager[object]:
    """Return no name, for devices without NVTX."""
    return _NOTHING


def names_for(device_type: str) -> Named:
    """NVTX ranges on CUDA; nothing elsewhere."""
    return torch.cuda.nvtx.range if device_type == "cuda" else unnamed


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

    Creates the folder; raises ``OSError`` if that is not allowed.  Without a folder it does nothing.
    """

    def __init__(self, folder: Path | None, steps: range, rank: int, device_type: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._steps, self._rank = folder, steps, rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]
        self._trace: profile | None = None
        self._first = self._last = 0
        self._on_demand = False

    def step(self, step_id: int) -> AbstractContextManager[object]:
        """Return the context of the launch of one step."""
        return _NOTHING if self._folder is None else self._traced(step_id)

    @contextlib.contextmanager
    def _traced(self, step_id: int) -> Iterator[None]:
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
        assert self._folder is not None, "rank 0 refuses orders to trace"
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
        if trace is None or self._folder is None:
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

    def named(self, otherwise: Named) -> Named:
        """Names for the trace while one is recorded, else for ``otherwise``."""
        if self._folder is None:
            return otherwise
        return lambda name: record_function(name) if self.is_recording else otherwise(name)


def make_step_profiler(config: EngineConfig, rank: int) -> StepProfiler:
    """Return this rank's profiler, as ``config`` asks; ``OSError`` if the folder of traces can not be made."""
    if config.profile is None:
        return StepProfiler(None, range(0), rank, config.device)
    return StepProfiler(Path(config.profile), parse_steps(config.profile_steps), rank, config.device)
