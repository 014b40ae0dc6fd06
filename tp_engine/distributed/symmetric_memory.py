"""All-reduces and all-gathers of all but large tensors, in memory that the ranks' GPUs share (torch symmetric memory).

One buffer per rank is allocated and mapped at the start: tensors are copied into it, and each rank's kernels read the
buffers of all ranks.  Each kernel begins and ends with an exchange of signals between all ranks, so the next one may
overwrite the buffers.  A CUDA graph can hold these kernels, even if the library's collectives go through the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from tp_engine.distributed.collectives import AddNorm, Communicator
from tp_engine.distributed.fused_norm import FusedNorm
from tp_engine.distributed.rank import Agreeing, all_do
from tp_engine.distributed.reduce_plan import (
    ALIGNMENT,
    WORD_BYTES,
    Machine,
    Method,
    RecordedSizes,
    ReducePlan,
    plan_reduces,
)
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import has_triton
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Collective: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_DTYPES = (torch.float32, torch.bfloat16)
_MARK_BYTES = 4096
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def with_symmetric_memory(
    library: Communicator,
    machine: Machine,
    allocate: Callable[[int], Share],
    host: Agreeing,
    progress: RankProgress,
    *,
    device: torch.device,
    largest_bytes: int,
    is_required: bool,
    wait: Callable[[], None],
    within: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Communicator:
    """``library`` with its smaller collectives through symmetric memory, or ``library`` itself if a rank cannot.

    ``allocate(num_bytes)`` creates a rank's own buffer, and returns what maps those of all ranks.  All ranks have one
    before the first maps those of the others, because mapping waits for a missing rank until torch's store gives up.
    ``largest_bytes`` is the size of the largest tensor that a step all-reduces.  If ``is_required``, a rank that
    cannot take part raises ``RankError`` on all ranks.
    ``wait`` waits for the device, and raises if another rank has ended.  ``within(what)`` bounds the time of each part,
    which may wait for another GPU for ever: mapping, copies between GPUs, and only then the first kernels that wait for
    signals, because a waiting kernel cannot be ended.

    All-gathers are ``library``'s if CUDA graphs can contain those.
    """
    plan_for = partial(plan_reduces, largest_bytes=largest_bytes, gathers=not library.can_capture)
    together = partial(all_do, host, "symmetric memory", "symm_mem", is_required=is_required)
    num_bytes = plan_for(replace(machine, has_multicast=True)).buffer_bytes
    own = together(lambda: allocate(num_bytes))
    with within("mapping the other ranks' memory"):
        buffer = None if own is None else together(own)
    if buffer is None:
        return library
    with within("copying between GPUs"):
        writes = together(lambda: write_marks(buffer, host.info, wait))
        reads = writes and together(lambda: check_marks(buffer, host.info, wait))
    if reads is None:
        return library
    multicasts = all(word == b"1" for word in host.all_gather_bytes(b"1" if buffer.has_multicast else b"0"))
    plan = plan_for(replace(machine, has_multicast=multicasts))
    made = SymmetricCommunicator(library, buffer, plan, progress)
    with within("waiting for the other GPUs' signals"):
        checked = together(lambda: check_results(made, library, device, wait))
    if checked is None:
        return library
    if host.info.is_first:
        sizes = plan.reduce_bytes, plan.gather_bytes
        logger.info("all-reduces up to %d bytes and all-gathers up to %d use symmetric memory: %s", *sizes, plan)
    return made


class SymmetricBuffer(Protocol):
    """The operations that need GPUs; ``tensor`` is 1-D, of a multiple of 16 bytes, and changed in place.  ``part`` (n,)
    int64 becomes (world size, n).

    ``has_multicast``: ``multimem`` can be used.  ``addresses`` and ``signals`` (world size,) int64, on the device:
    the addresses of each rank's buffer and signals, for kernels of our own.
    """

    has_multicast: bool
    addresses: torch.Tensor
    signals: torch.Tensor

    def one_shot(self, tensor: torch.Tensor) -> None: ...

    def two_shot(self, tensor: torch.Tensor) -> None: ...

    def multimem(self, tensor: torch.Tensor) -> None: ...

    def all_gather(self, part: torch.Tensor) -> torch.Tensor: ...

    def of(self, rank: int) -> torch.Tensor:
        """The buffer of ``rank`` (bytes,) uint8, in its own memory."""


Share: TypeAlias = Callable[[], SymmetricBuffer]
"""Maps the buffers of all ranks; a collective."""


def allocate_symmetric(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Share:
    """Allocate ``num_bytes`` of ``device``, outside of torch's caching allocator, for the ranks of ``group``."""
    # This backend's handles have addresses; torch's other ones, which the environment may choose, may have none.
    if _symmetric_memory.get_backend(device) != "CUDA":
        _symmetric_memory.set_backend("CUDA")
    own = _symmetric_memory._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    return lambda: TorchSymmetricBuffer(own, group)


class TorchSymmetricBuffer(SymmetricBuffer):
    """``own`` (bytes,) uint8 of every rank, mapped by all of them.  Making one is a collective."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group_name = group.group_name
        self._bytes = own
        self._handle = _symmetric_memory.rendezvous(own, group)
        self.has_multicast = self._handle.multicast_ptr != 0
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=own.device)
        self.signals = torch.tensor(self._handle.signal_pad_ptrs, dtype=torch.int64, device=own.device)

    def one_shot(self, tensor: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._room_for(tensor), tensor, "sum", self._group_name, tensor)

    def two_shot(self, tensor: torch.Tensor) -> None:
        room = self._room_for(tensor).copy_(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_out(room, "sum", self._group_name, tensor)

    def multimem(self, tensor: torch.Tensor) -> None:
        room = self._room_for(tensor).copy_(tensor)
        tensor.copy_(torch.ops.symm_mem.multimem_all_reduce_(room, "sum", self._group_name))

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        from tp_engine.kernels.distributed.gather_triton import all_gather_triton

        return all_gather_triton(part, buffers=self.addresses, signals=self.signals, rank=self._handle.rank)

    def of(self, rank: int) -> torch.Tensor:
        found: torch.Tensor = self._handle.get_buffer(rank, self._bytes.shape, torch.uint8)
        return found

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._bytes[: tensor.nbytes].view(tensor.dtype)


class SymmetricCommunicator(Communicator):
    """``library``'s collectives, but all-reduces and all-gathers of the plan's sizes go through ``buffer``.

    ``fused_norm``: all-reduces of up to ``fused_bytes`` with a norm behind them are one kernel, once that is proven.
    """

    fused_norm: FusedNorm | None = None
    fused_bytes = 0

    def __init__(
        self, library: Communicator, buffer: SymmetricBuffer, plan: ReducePlan, progress: RankProgress
    ) -> None:
        self.info = library.info
        self.can_capture = library.can_capture
        self.plan = plan
        self.buffer = buffer
        self._library = library
        self._progress = progress
        self._run = {
            Method.ONE_SHOT: buffer.one_shot,
            Method.TWO_SHOT: buffer.two_shot,
            Method.MULTIMEM: buffer.multimem,
        }

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        method = self.plan.choose(tensor.nbytes) if _fits(tensor) else Method.LIBRARY
        if method == Method.LIBRARY:
            return self._library.all_reduce(tensor)
        self._progress.collective()
        self._run[method](tensor.view(-1))
        return tensor

    def all_reduce_add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        rule: NormRule,
        scale: float,
        stream_scale: float,
        add_norm: AddNorm,
    ) -> torch.Tensor:
        fused = self.fused_norm if self.can_fuse(part) and part.nbytes <= self.fused_bytes else None
        if fused is None or not fused.takes(rule, scale, stream_scale):
            return super().all_reduce_add_norm(part, residual, rule, scale, stream_scale, add_norm)
        self._progress.collective()
        return fused(part, residual, rule, scale, stream_scale)

    def can_fuse(self, part: torch.Tensor) -> bool:
        """Return whether ``part`` is all-reduced in one shot, as in kernels with a norm behind."""
        return _fits(part) and self.plan.choose(part.nbytes) == Method.ONE_SHOT

    def why_not_capture(self, sizes: RecordedSizes) -> str | None:
        """Why not: all-reduces in symmetric memory can be captured; if the library's cannot, all tensors must fit."""
        obstacle = None if self.can_capture else self.plan.why_not_all(sizes)
        if obstacle is None:
            return None
        return f"symmetric memory does not take the ranks' {obstacle}; what their library takes cannot be captured"

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.contiguous()
        if part.dim() == 0 or not (self.plan.gathers(part.nbytes) and _is_aligned(part, WORD_BYTES)):
            return self._library.all_gather(tensor)
        self._progress.collective()
        parts = self.buffer.all_gather(part.view(-1).view(torch.int64)).view(part.dtype)
        return parts.view(-1, *part.shape).movedim(0, -2).flatten(-2)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._library.gather(tensor)


def _fits(tensor: torch.Tensor) -> bool:
    """Whether all-reduces accept ``tensor``; all ranks call with tensors of one kind, so they get the same answer."""
    return tensor.dtype in _DTYPES and tensor.is_contiguous() and _is_aligned(tensor, ALIGNMENT)


def _is_aligned(tensor: torch.Tensor, num_bytes: int) -> bool:
    return tensor.storage_offset() * tensor.itemsize % num_bytes == 0


def probe_machine(indices: Sequence[int]) -> Machine:
    """What the ranks' GPUs ``indices`` can do; asks the driver and allocates nothing."""
    distinct = sorted(set(indices))
    pairs = [(a, b) for a in distinct for b in distinct if a != b]
    return Machine(
        world_size=len(indices),
        capability=min(torch.cuda.get_device_capability(index) for index in distinct),
        has_peer_access=not env.is_peer_access_off() and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        has_peer_atomics=all(has_native_atomics(a, b) for a, b in pairs),
        has_triton=has_triton(),
    )


def has_native_atomics(source: int, target: int) -> bool:
    """Whether GPU ``source`` can change a word of GPU ``target`` atomically; False if unknown.

    Torch does not tell, so this asks the driver, which counts GPUs as torch does (CUDA Driver API,
    cuDeviceGetP2PAttribute).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    devices = (ctypes.c_int(), ctypes.c_int())
    calls = [driver.cuInit(0)]
    calls += [
        driver.cuDeviceGet(ctypes.byref(one), index) for one, index in zip(devices, (source, target), strict=True)
    ]
    found = ctypes.c_int()
    calls.append(driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices))
    return not any(calls) and found.value == 1


def write_marks(buffer: SymmetricBuffer, info: RankInfo, wait: Callable[[], None]) -> int:
    """Copy this rank's bytes into every rank's buffer; returns their number in each."""
    for owner in range(info.world_size):
        _mark(buffer, info.rank, owner).copy_(_written(buffer, info.rank, owner))
    wait()
    return len(_mark(buffer, info.rank, info.rank))


def check_marks(buffer: SymmetricBuffer, info: RankInfo, wait: Callable[[], None]) -> int:
    """Read what all ranks wrote here, and what this one wrote everywhere; returns the number of places.

    Raises ``RuntimeError`` if a byte did not arrive: a host may drop what GPUs write to each other (IOMMU, ACS),
    although the driver says that they can.
    """
    pairs = [(rank, info.rank) for rank in range(info.world_size)]
    pairs += [(info.rank, rank) for rank in range(info.world_size)]
    found = [_mark(buffer, writer, owner).clone() for writer, owner in pairs]
    wait()
    for (writer, owner), copy in zip(pairs, found, strict=True):
        if not torch.equal(copy, _written(buffer, writer, owner)):
            raise RuntimeError(f"what rank {writer} wrote into the memory of rank {owner}'s GPU did not arrive")
    return len(pairs)


def _mark(buffer: SymmetricBuffer, writer: int, owner: int) -> torch.Tensor:
    """The place in ``owner``'s buffer for the bytes of ``writer``."""
    room = min(_MARK_BYTES, buffer.of(owner).nbytes // len(buffer.addresses))
    return buffer.of(owner)[writer * room : (writer + 1) * room]


def _written(buffer: SymmetricBuffer, writer: int, owner: int) -> torch.Tensor:
    place = _mark(buffer, writer, owner)
    numbers = torch.arange(len(place), device=buffer.addresses.device, dtype=torch.int64)
    return numbers.add_(1 + 16 * writer + owner).remainder_(251).to(torch.uint8)


def check_results(
    communicator: SymmetricCommunicator, library: Communicator, device: torch.device, wait: Callable[[], None]
) -> int:
    """All-reduce a tensor of each method and dtype, and gather one; a collective.

    Returns the number of results, all equal to ``library``'s.  The tensors hold whole numbers, so every order of
    summation gives the same bits.  A rank that finds a difference continues with the others, and raises
    ``RuntimeError`` at the end.
    """
    plan, rank = communicator.plan, communicator.info.rank
    wrong: list[str] = []

    def compare(what: str, mine: torch.Tensor, ours: Collective, theirs: Collective) -> int:
        # Others at once behind: what comes too early changes what is still read.
        given = mine, mine + 1
        expected = [theirs(one.clone()) for one in given]
        found = [ours(one.clone()) for one in given]
        wait()
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            wrong.append(f"{what} of {mine.nbytes} bytes of {mine.dtype} gave another result")
        return len(found)

    num_results = 0
    for num_bytes in sorted({plan.one_shot_bytes, plan.multimem_bytes, plan.two_shot_bytes} - {0}):
        for dtype in _DTYPES:
            mine = (
                torch.arange(num_bytes // dtype.itemsize, device=device, dtype=torch.int64)
                .remainder_(13)
                .add_(rank)
                .to(dtype)
            )
            method = plan.choose(num_bytes).name
            num_results += compare(method, mine, communicator.all_reduce, library.all_reduce)
    if plan.gather_bytes:
        mine = torch.arange(plan.gather_bytes // WORD_BYTES, device=device, dtype=torch.int64).add_(rank << 32)
        num_results += compare("an all-gather", mine, communicator.all_gather, library.all_gather)
    if wrong:
        raise RuntimeError(wrong[0])
    return num_results
