"""Recording a step once and running it again: CUDA graphs, and a stand-in that simply calls the step anew.

A recorded step reads its inputs from, and leaves its outputs in, the tensors that it used when it was recorded.  What
CUDA graphs are for GPUs, tapes are for CPUs: ``tape_recorder``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], torch.Tensor]


class Recording(Protocol):
    """A recorded step.  ``output`` is what it returned last; where it ``is_settled``, always the same tensor."""

    output: torch.Tensor
    is_settled: bool

    def run(self) -> torch.Tensor:
        """Run it again; its output tensor, which the next run overwrites."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, step: Step) -> Recording:
        """Record ``step``, which may run before, for what happens only the first time, and allocates nothing outside
        of what it returns."""


class _CudaRecording:
    is_settled = True

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def run(self) -> torch.Tensor:
        self._graph.replay()
        return self.output


class CudaRecorder:
    """CUDA graphs that share one pool of memory; record the largest first, the smaller ones then fit into its room."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Recording:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _CudaRecording(graph, output)


class _Repeated:
    is_settled = True

    def __init__(self, step: Step) -> None:
        self._step = step
        self.output = step()

    def run(self) -> torch.Tensor:
        self.output = self._step()
        return self.output


class RepeatingRecorder:
    """Records nothing and calls the step each time: the padded decode path on any device, for tests."""

    def record(self, step: Step) -> Recording:
        return _Repeated(step)
