"""How a tensor is all-reduced or all-gathered, by its size, the number of ranks and what their GPUs can do.

::

    bytes      0 ...... one_shot ............ two_shot, or multimem ............ above
    runs       ONE_SHOT          TWO_SHOT, or MULTIMEM where there is multicast  LIBRARY (NCCL)

    ONE_SHOT   every rank reads all tensors and adds them up: one exchange of signals, world size times the bytes
    TWO_SHOT   every rank adds up its part, then gives it to all: twice the signals, about twice the bytes
    MULTIMEM   the switch adds and distributes (NVLink SHARP)

The limits are those published for the same operations (vLLM's custom and symmetric-memory all-reduce, PyTorch's
intra-node all-reduce).  An all-gather is one kernel up to the size at which a rank reads about as many bytes as for the
largest two-shot all-reduce.
"""

import enum
from dataclasses import dataclass

from tp_engine.system.units import KIB, MIB

MIN_CAPABILITY = (8, 0)
ALIGNMENT = 16
"""Tensors whose size or address is not a multiple of this, in bytes, are all-reduced by the library."""
WORD_BYTES = 8
"""The same for all-gathers."""

SHARED_SLOT_BYTES = 256 * KIB
"""On CPUs, tensors go through shared memory in pieces of this size, which stay in the cores' caches."""

_ONE_SHOT_LIMITS = {2: 1 * MIB, 4: 512 * KIB, 8: 256 * KIB}
_TWO_SHOT_LIMIT = 8 * MIB
_MULTIMEM_LIMIT = 32 * MIB
_GATHERED_LIMIT = 2 * _TWO_SHOT_LIMIT  # the parts of all ranks together
_SHARED_ONE_SHOT_LIMIT = 64 * KIB
_MULTIMEM_CAPABILITY = (9, 0)
_MULTIMEM_WORLD_SIZE = 4


class Method(enum.Enum):
    """How an all-reduce is done."""

    LIBRARY = enum.auto()
    ONE_SHOT = enum.auto()
    TWO_SHOT = enum.auto()
    MULTIMEM = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The ranks' GPUs: their lowest compute ``capability``, and whether each can and may read the memory of all others.

    ``has_peer_atomics``: each can change a word of another's memory atomically, as all signals between kernels do.
    Links between GPUs (NVLink) have it; over PCI Express memory can often be read, but a signal may be lost, and the
    kernel that waits for it never ends.  ``has_multicast``: a switch between them adds and distributes; known once
    memory is shared.  ``has_triton``: the engine's own kernels can be compiled.
    """

    world_size: int
    capability: tuple[int, int]
    has_peer_access: bool
    has_peer_atomics: bool
    has_multicast: bool = False
    has_triton: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSizes:
    """Bytes of the tensors that recorded steps all-reduce, and of the parts that they all-gather."""

    all_reduces: frozenset[int]
    all_gathers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducePlan:
    """The largest tensor of each method, in bytes; 0 if the method is not used.  Larger tensors go to the library.

    ``gather_bytes``: of the part of a rank in an all-gather.
    """

    one_shot_bytes: int = 0
    two_shot_bytes: int = 0
    multimem_bytes: int = 0
    gather_bytes: int = 0

    @property
    def reduce_bytes(self) -> int:
        """The largest tensor that is all-reduced in symmetric memory."""
        return max(self.one_shot_bytes, self.two_shot_bytes, self.multimem_bytes)

    @property
    def buffer_bytes(self) -> int:
        """The size of each rank's buffer."""
        return max(self.reduce_bytes, self.gather_bytes)

    def gathers(self, num_bytes: int) -> bool:
        """Whether parts of ``num_bytes`` are all-gathered in symmetric memory, the same on every rank."""
        return 0 < num_bytes <= self.gather_bytes and num_bytes % WORD_BYTES == 0

    def why_not_all(self, sizes: RecordedSizes) -> str | None:
        """Which collectives of ``sizes`` go to the library, and why; None if none does."""
        reduced = [size for size in sizes.all_reduces if self.choose(size) == Method.LIBRARY]
        gathered = [size for size in sizes.all_gathers if not self.gathers(size)]
        for name, others, unit, largest in (
            ("all-reduces", reduced, ALIGNMENT, self.reduce_bytes),
            ("all-gathers", gathered, WORD_BYTES, self.gather_bytes),
        ):
            if others:
                return f"{name} of {max(others):,} bytes; it takes multiples of {unit} up to {largest:,}"
        return None

    def choose(self, num_bytes: int) -> Method:
        """The method for a tensor of ``num_bytes``, the same on every rank."""
        if num_bytes % ALIGNMENT or num_bytes == 0:
            return Method.LIBRARY
        if num_bytes <= self.one_shot_bytes:
            return Method.ONE_SHOT
        if num_bytes <= self.multimem_bytes:
            return Method.MULTIMEM
        return Method.TWO_SHOT if num_bytes <= self.two_shot_bytes else Method.LIBRARY


def plan_reduces(machine: Machine, largest_bytes: int, *, gathers: bool = True) -> ReducePlan:
    """The plan for all-reduces of up to ``largest_bytes``, and for all-gathers if it ``gathers``.

    ``machine`` is one for which ``why_not`` is None.
    """
    largest = -(-largest_bytes // ALIGNMENT) * ALIGNMENT
    multicasts = (
        machine.has_multicast
        and machine.capability >= _MULTIMEM_CAPABILITY
        and machine.world_size >= _MULTIMEM_WORLD_SIZE
    )
    return ReducePlan(
        one_shot_bytes=min(_ONE_SHOT_LIMITS[machine.world_size], largest),
        two_shot_bytes=min(_TWO_SHOT_LIMIT, largest),
        multimem_bytes=min(_MULTIMEM_LIMIT, largest) if multicasts else 0,
        gather_bytes=_GATHERED_LIMIT // machine.world_size if gathers and machine.has_triton else 0,
    )


def shared_two_shot_bytes(world_size: int) -> int:
    """The largest piece that takes one shot on CPUs.  With two ranks all do: two shots would read as many bytes."""
    return SHARED_SLOT_BYTES if world_size == 2 else _SHARED_ONE_SHOT_LIMIT


def why_not(machine: Machine, dtype: str) -> str | None:
    """Why these ranks cannot use symmetric memory for tensors of ``dtype`` (such as ``float32``); None if they can."""
    if machine.world_size not in _ONE_SHOT_LIMITS:
        sizes = ", ".join(map(str, _ONE_SHOT_LIMITS))
        return f"symmetric memory is for {sizes} ranks, and there are {machine.world_size}"
    if dtype not in ("float32", "bfloat16"):
        return f"symmetric memory adds float32 and bfloat16, and dtype is {dtype}"
    if machine.capability < MIN_CAPABILITY:
        major, minor = machine.capability
        return f"symmetric memory needs GPUs of compute capability 8.0, and one is of {major}.{minor}"
    if not machine.has_peer_access:
        return (
            "the GPUs cannot read each other's memory (nvidia-smi topo -p2p r), or NCCL_P2P_DISABLE or NCCL_P2P_LEVEL "
            "forbids it"
        )
    if not machine.has_peer_atomics:
        return "the GPUs' signals to each other may be lost: their link has no atomics (nvidia-smi topo -p2p a)"
    return None
