"""Decode steps of CPUs on tapes (``cpu/tape.py``): what CUDA graphs are for GPUs.

A step is recorded in its first run, compared in its second, then used::

    first run     the step, recorded                          its own output
    second run    the step, then the tape                     equal bit by bit, or the tape is thrown away;
                                                              recurrent states are put back in between
    from then on  the tape: one call of C, or one between two collectives
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tp_engine.cpu import Tape, is_recording, recording
from tp_engine.distributed.collectives import Communicator
from tp_engine.system.log import get_logger
from tp_engine.system.units import round_up
from tp_engine.worker.graphs.recorder import Keep, Step, keep_nothing

_logger = get_logger(__name__)

_ALIGNMENT = 64
_SLAB_BYTES = 1 << 18
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class TapeRecorder:
    """Makes tapes, which share their memory.

    All ranks decide together whether to use a tape: steps hold collectives.
    """

    def __init__(self, library: ctypes.CDLL, communicator: Communicator) -> None:
        self._library = library
        self._communicator = communicator
        self._memory = TapeMemory()
        self._known_objections: set[str] = set()

    def record(self, step: Step, keep: Keep = keep_nothing) -> TapeRecording:
        """Return a recording of ``step``, made in its first run."""
        return TapeRecording(step, self, keep)

    def make_tape(self, step: Step) -> tuple[torch.Tensor, Tape | None]:
        """Run ``step``; returns its output and, if a tape can hold all of it, a tape.  A collective."""
        tape, watch = Tape(self._library), TapeWatch(self._memory)
        with recording(tape), watch:
            output = step()
        return output, tape if self.agree(watch.objection) else None

    def agree(self, objection: str | None) -> bool:
        """Return whether all ranks are without objection; logs each objection of this rank once.  A collective."""
        if objection is not None and objection not in self._known_objections:
            self._known_objections.add(objection)
            _logger.warning("decode steps are not recorded, so they are slower: %s", objection)
        return (
            self._communicator.all_reduce(
                torch.tensor([float(objection is not None)], dtype=torch.float32, device="cpu")
            ).item()
            == 0.0
        )


class TapeRecording:
    """A step that is recorded on its first run; see the module's text."""

    output: torch.Tensor

    def __init__(self, step: Step, recorder: TapeRecorder, keep: Keep) -> None:
        self._step, self._keep = step, keep
        self._recorder = recorder
        self._tape: Tape | None = None
        self.run_count = 0
        self.is_settled = False

    def run(self) -> torch.Tensor:
        if self.run_count == 0:
            self.run_count = 1
            self.output, self._tape = self._recorder.make_tape(self._step)
            self.is_settled = self._tape is not None
        elif self._tape is None:
            self.output = self._step()
        elif self.run_count == 1:
            self.run_count = 2
            self._compare(self._tape)
        else:
            self._tape.run()
        return self.output

    def _compare(self, tape: Tape) -> None:
        put_back = self._keep()
        expected = self._step().view(torch.uint8).clone()
        put_back()
        tape.run()
        is_equal = torch.equal(self.output.view(torch.uint8), expected)
        if not self._recorder.agree(None if is_equal else "its recording gave another result"):
            self._tape, self.is_settled = None, False
            put_back()
            self.output = self._step()


class TapeMemory:
    """A pool of slabs for what recorded steps allocate; a tensor returns its memory when it is garbage.

    Memory that a step frees is used again, later in the step and by other recordings; a recording's output keeps its
    memory as long as the output is kept.
    """

    def __init__(self) -> None:
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []  # (slab, first byte, end), without neighbours

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised, contiguous tensor."""
        num_bytes = shape.numel() * dtype.itemsize
        room = round_up(max(num_bytes, 1), _ALIGNMENT)
        index = next((i for i, (_, first, end) in enumerate(self._free) if end - first >= room), None)
        if index is None:
            index = self._add_slab(room)
        slab, first, end = self._free.pop(index)
        if end - first > room:
            self._free.append((slab, first + room, end))
        taken = self._slabs[slab][first : first + num_bytes]
        weakref.finalize(taken, self._give_back, slab, first, first + room).atexit = False
        return torch.from_numpy(taken).view(dtype).view(shape)

    def _add_slab(self, room: int) -> int:
        num_bytes = max(room, _SLAB_BYTES)
        whole = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT
        self._slabs.append(whole[start : start + num_bytes])
        self._free.append((len(self._slabs) - 1, 0, num_bytes))
        return len(self._free) - 1

    def _give_back(self, slab: int, first: int, end: int) -> None:
        for neighbour in [piece for piece in self._free if piece[0] == slab and (piece[2] == first or piece[1] == end)]:
            self._free.remove(neighbour)
            first, end = min(first, neighbour[1]), max(end, neighbour[2])
        self._free.append((slab, first, end))


class TapeWatch(TorchDispatchMode):
    """Takes allocations from ``memory`` and permits views; ``objection`` names the first other operation of PyTorch.

    Such an operation runs, but a tape of the step would lack it.
    """

    def __init__(self, memory: TapeMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.objection: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler, which takes a second or two in the first decode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_recording():
            return func(*args, **kwargs)
        if func._schema.name in _ALLOCATIONS:
            return self._allocate(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.objection is None and (func._schema.is_mutable or not _is_view(result, args)):
            self.objection = f"{func} is no compiled kernel"
        return result

    def _allocate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        wanted: torch.Tensor = func(*args, **kwargs)
        if wanted.device.type == "cpu" and wanted.is_contiguous():
            return self._memory.allocate(wanted.shape, wanted.dtype)
        self.objection = self.objection or f"{func} allocates a tensor of another kind"
        return wanted


def _is_view(result: Any, arguments: Iterable[Any]) -> bool:
    """Whether ``result`` consists of views of tensors among ``arguments`` only."""
    known = {_storage(one) for one in arguments} - {None}
    return all(_storage(one) in known for one in (result if isinstance(result, (list, tuple)) else [result]))


def _storage(one: Any) -> int | None:
    """The address of a tensor's memory; None for other objects and for tensors in oneDNN's own order."""
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return None
    return one.untyped_storage().data_ptr()
