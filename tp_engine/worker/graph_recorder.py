"""Recording a step once and running it again: CUDA graphs, and a stand-in that simply calls the step anew.

A recorded step reads its inputs from, and leaves its outputs in, the tensors that it used when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], torch.Tensor]


class Recording(Protocol):
    """A recorded step."""

    def run(self) -> torch.Tensor:
        """Run it again; its output tensor, which the next run overwrites."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, step: Step) -> Recording:
        """Record ``step``, which has run before and allocates nothing outside of what it returns."""


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self._output = output

    def run(self) -> torch.Tensor:
        self._graph.replay()
        return self._output


class CudaRecorder:
    """CUDA graphs that share one pool of memory; record the largest first, the smaller ones then fit into its room."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _CudaRecording(graph, output)


class _Repeated:
    def __init__(self, step: Step) -> None:
        self._step = step

    def run(self) -> torch.Tensor:
        return self._step()


class RepeatingRecorder:
    """Records nothing and calls the step each time: the padded decode path on any device, for tests."""

    def record(self, step: Step) -> Recording:
        return _Repeated(step)
