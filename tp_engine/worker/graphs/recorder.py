"""Recordings of steps, and who makes them: CUDA graphs here, tapes of CPUs in ``tape_recorder``.

A recorded step reads its inputs from, and leaves its outputs in, the tensors that it used when it was recorded.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from tp_engine.worker.results.readback import Check, never_fails, record_event, wait_for

Step: TypeAlias = Callable[[], torch.Tensor]
Keep: TypeAlias = Callable[[], Callable[[], None]]
"""Keeps what a step may change only once, and returns a function that puts it back."""


def keep_nothing() -> Callable[[], None]:
    """Return what puts nothing back: the step may run again."""
    return lambda: None


class Recording(Protocol):
    """A recorded step.  ``output`` is its last output; if it ``is_settled``, always the same tensor."""

    output: torch.Tensor
    is_settled: bool

    def run(self) -> torch.Tensor:
        """Run the step; returns its output tensor, which the next run overwrites."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        """Record ``step``.  It may run once before, for one-time work, and allocates only what it returns.

        Where it is then run again for real, what ``keep`` keeps is restored first.
        """


class _CudaRecording:
    is_settled = True

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def run(self) -> torch.Tensor:
        self._graph.replay()
        return self.output


class CudaRecorder:
    """CUDA graphs that share one pool of memory: record the largest first, the smaller ones then reuse its memory.

    ``check`` is asked while the device runs the step before its recording, because torch then waits in the driver.
    """

    def __init__(self, check: Check = never_fails) -> None:
        self._check = check
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        step()  # all rows are padding, so there is nothing to keep
        wait_for(record_event(), self._check)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _CudaRecording(graph, output)
