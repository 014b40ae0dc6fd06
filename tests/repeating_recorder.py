"""A recorder that records nothing, for the padded decode path on any device."""

from __future__ import annotations

import torch

from tp_engine.worker.graphs.recorder import Keep, Recording, Step, keep_nothing


class _Repeated:
    is_settled = True

    def __init__(self, step: Step) -> None:
        self._step = step
        self.output = step()

    def run(self) -> torch.Tensor:
        self.output = self._step()
        return self.output


class RepeatingRecorder:
    """Runs the step itself at every replay."""

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        return _Repeated(step)
