"""Decode steps of CPUs on tapes (``kernels/native/tape.py``): what CUDA graphs are for GPUs.

A step is recorded while it serves its first rows, compared while it serves the next ones, then trusted::

    first run     the step, recorded                          its own output
    second run    the step, then the tape                     equal bit by bit, or the tape is thrown away
    from then on  the tape: one call of C, or one between two collectives
"""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels.native.tape import Tape, recording
from tp_engine.log import get_logger
from tp_engine.ranks.collectives import Communicator
from tp_engine.worker.graph_recorder import Step
from tp_engine.worker.tape_memory import TapeMemory, TapeWatch

_logger = get_logger(__name__)


class TapeRecorder:
    """Makes tapes, which share their memory.  All ranks decide together what is trusted: steps hold collectives."""

    def __init__(self, library: ctypes.CDLL, communicator: Communicator) -> None:
        self._library = library
        self._communicator = communicator
        self._memory = TapeMemory()
        self._known_objections: set[str] = set()

    def record(self, step: Step) -> TapeRecording:
        """A recording of ``step`` that is made when it first runs."""
        return TapeRecording(step, self)

    def make_tape(self, step: Step) -> tuple[torch.Tensor, Tape | None]:
        """Run ``step``; its output, and a tape of it unless it does what no tape can hold.  A collective."""
        tape, watch = Tape(self._library), TapeWatch(self._memory)
        with recording(tape), watch:
            output = step()
        return output, tape if self.agree(watch.objection) else None

    def agree(self, objection: str | None) -> bool:
        """Whether no rank has an objection; this rank's goes to the log, each once for all sizes.  A collective."""
        if objection is not None and objection not in self._known_objections:
            self._known_objections.add(objection)
            _logger.warning("decode steps are not recorded, so they are slower: %s", objection)
        return self._communicator.all_reduce(torch.tensor([float(objection is not None)])).item() == 0.0


class TapeRecording:
    """A step that is recorded on its first run; see the module's text."""

    output: torch.Tensor

    def __init__(self, step: Step, recorder: TapeRecorder) -> None:
        self._step = step
        self._recorder = recorder
        self._tape: Tape | None = None
        self._run_count = 0
        self.is_settled = False

    def run(self) -> torch.Tensor:
        """See ``Recording``."""
        if self._run_count == 0:
            self._run_count = 1
            self.output, self._tape = self._recorder.make_tape(self._step)
            self.is_settled = self._tape is not None
        elif self._tape is None:
            self.output = self._step()
        elif self._run_count == 1:
            self._run_count = 2
            self._compare(self._tape)
        else:
            self._tape.run()
        return self.output

    def _compare(self, tape: Tape) -> None:
        expected = self._step().view(torch.uint8).clone()
        tape.run()
        is_equal = torch.equal(self.output.view(torch.uint8), expected)
        if not self._recorder.agree(None if is_equal else "its recording gave another result"):
            self._tape, self.is_settled = None, False
            self.output = self._step()
