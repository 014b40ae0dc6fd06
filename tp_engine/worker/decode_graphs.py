"""The decode step, recorded for padded batch sizes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tp_engine.worker.graph_recorder import Recorder, Recording


class DecodeGraphs:
    """One recording per size of ``sizes`` (rising); a batch runs in the smallest that holds it.

    ``step(size)`` runs a decode step of ``size`` rows, padding included, from inputs that stay at one place, and
    returns its output, whose first dimension is ``size``.
    """

    def __init__(self, sizes: Sequence[int], recorder: Recorder, step: Callable[[int], torch.Tensor]) -> None:
        self._sizes = list(sizes)
        self._recordings: dict[int, Recording] = {}
        for size in reversed(self._sizes):
            self._recordings[size] = recorder.record(partial(step, size))

    def close(self) -> None:
        """Destroy the recordings, and with them what they hold of the device and of the ranks' collectives."""
        self._recordings.clear()

    @property
    def largest(self) -> int:
        """The most rows that a recorded step holds."""
        return self._sizes[-1]

    def padded_size(self, num_rows: int) -> int:
        """The size of the recording that ``num_rows`` rows run in."""
        assert 0 < num_rows <= self.largest
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def output(self, size: int) -> torch.Tensor:
        """What the step of ``size`` rows returned last."""
        return self._recordings[size].output

    def is_settled(self, num_rows: int) -> bool:
        """Whether the output of the step that ``num_rows`` rows run in is always at the same place."""
        return self._recordings[self.padded_size(num_rows)].is_settled

    def run(self, num_rows: int) -> torch.Tensor:
        """Run the step, whose inputs are in place; the first ``num_rows`` rows of its output."""
        size = self.padded_size(num_rows)
        output = self._recordings[size].run()
        return output if size == num_rows else output[:num_rows]
