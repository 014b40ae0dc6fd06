"""Tensors of this process on their way to the ranks of this host: safetensors files in memory, without a name.

::

    (name, tensor), (name, tensor), ...   taken one after the other, from any device, each copied once
    | file of up to 512 MiB | file of up to 512 MiB | file ... |      memfd, read by ranks as /proc/PID/fd/FD

So a generator may make each tensor as it is asked for.  The files take the memory of all tensors together until
``close``; nothing is left behind when a process is killed.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from tp_engine.errors import RequestError
from tp_engine.weights.checkpoint import DTYPES
from tp_engine.worker.memory.host_memory import HostMemory, host_memory

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""The tensors of a checkpoint by their names in it, such as ``module.named_parameters()`` of a transformers model."""

_FILE_BYTES = 512 << 20
_HEADER_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StagedTensors(AbstractContextManager["StagedTensors"]):
    """Copies all ``tensors``; a context manager.  ``RequestError`` for what no checkpoint can hold, or without room:
    ``memory`` tells what the host has."""

    def __init__(
        self,
        tensors: NamedTensors,
        *,
        file_bytes: int = _FILE_BYTES,
        memory: Callable[[], HostMemory] = host_memory,
    ) -> None:
        self._memory = memory
        self._descriptors: list[int] = []
        names: set[str] = set()
        waiting: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        try:
            for name, tensor in tensors:
                _check(name, tensor, names)
                waiting.append((name, tensor.detach()))
                num_bytes += tensor.nbytes
                if num_bytes >= file_bytes:
                    self._write(waiting)
                    waiting, num_bytes = [], 0
            if waiting:
                self._write(waiting)
            if not names:
                raise RequestError("there are no tensors; give all of the model's, by their names in a checkpoint")
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[dict[str, Any]]:
        """Each file as the ranks find it: the fields of ``SharedFile``."""
        return [
            {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "inode": os.fstat(descriptor).st_ino}
            for descriptor in self._descriptors
        ]

    def close(self) -> None:
        """Free the memory, once no rank reads it; safe to call twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """One file: the length of the header, the header, and the tensors, those of large elements first, so that all
        are aligned."""
        tensors = sorted(tensors, key=lambda item: -item[1].element_size())
        header: dict[str, dict[str, Any]] = {}
        end = 0
        for name, tensor in tensors:
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        packed = json.dumps(header).encode()
        packed += b" " * (-len(packed) % _HEADER_ALIGNMENT)
        first = 8 + len(packed)
        if first + end > (free := self._memory().free):
            raise RequestError(
                f"{first + end} bytes of tensors are to be handed over, and {free} are free on this host"
            )
        self._descriptors.append(os.memfd_create("tp_engine weights", os.MFD_CLOEXEC))
        os.ftruncate(self._descriptors[-1], first + end)
        memory = mmap.mmap(self._descriptors[-1], first + end)
        memory[:first] = len(packed).to_bytes(8, "little") + packed
        room = torch.frombuffer(memory, dtype=torch.uint8)
        for name, tensor in tensors:
            begin, end = header[name]["data_offsets"]
            room[first + begin : first + end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _check(name: str, tensor: torch.Tensor, names: set[str]) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise RequestError(f"{name} is {kind}, which a checkpoint cannot hold; give dense tensors")
    if name in names:
        raise RequestError(f"{name} comes twice; give each tensor once")
    names.add(name)
