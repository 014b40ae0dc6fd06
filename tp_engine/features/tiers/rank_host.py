"""The host tier of one rank: memory of the host that holds blocks for which the pool has no room.

::

    pool    (blocks, block_bytes)       on the device        | b0 | b1 | b2 | ...
    slots   (slots, blob_bytes)         on the host          | s0 | s1 | s2 | s3 | s4 | ...

A slot has a block, all layers and scales (kv_cache.py), as the codec encodes it (codecs/), by default unchanged.  It
belongs to no group: the scheduler knows what lies where, and plans say what moves (block_moves.py).
``kv_offloading_size`` is divided among all ranks, which have equally many slots.

On CUDA the memory is pinned as it is, because PyTorch's allocator of pinned memory rounds up to a power of two.  On a
CPU pages come into use with their slots.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tp_engine.config import EngineConfig
from tp_engine.distributed.groups import RankGroups
from tp_engine.errors import MemoryBudgetError, RequestError
from tp_engine.features.tiers.block_moves import BlockGroups, BlockMover, CudaMover, StoreReports
from tp_engine.features.tiers.codecs.base import Codec
from tp_engine.features.tiers.feature import DISK_READS, DISK_WRITES, LOADS, SECTIONS, STORES, WAIT_LOAD
from tp_engine.features.tiers.options import is_lossy
from tp_engine.features.tiers.rank_disk import DiskTierWorker
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.job.tier_progress import TierProgress
from tp_engine.kernels.huge_pages import map_zeros
from tp_engine.model_config.kv_layout import KvCapacity, MoveCounters
from tp_engine.plan import StepPlan
from tp_engine.system.log import get_logger
from tp_engine.system.units import GIB, format_gib
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.memory.host_memory import HostMemory, host_memory
from tp_engine.worker.memory.meter import settle_slots

logger = get_logger(__name__)


def choose_slots(
    size_gib: float, slot_bytes: int, *, world_size: int, local_world_size: int, promised_bytes: int, memory: HostMemory
) -> int:
    """Return this rank's number of slots of ``slot_bytes`` for ``kv_offloading_size``.

    ``memory`` is what this host's ranks share; of the free part each rank will use ``promised_bytes`` otherwise: on a
    CPU its pool, whose pages are not yet in use.  Raises ``MemoryBudgetError`` if not one block fits into the size, or
    the size into the memory.
    """
    num_slots = int(size_gib * GIB) // world_size // slot_bytes
    if num_slots < 1:
        least = _short(slot_bytes * world_size / GIB, math.ceil)
        raise MemoryBudgetError(
            f"kv_offloading_size is {size_gib:g} GiB, which {world_size} ranks share, and one block of a rank takes "
            f"{slot_bytes} bytes; raise it to at least {least}, or set it to 0"
        )
    needed = num_slots * slot_bytes * local_world_size
    left = memory.free - promised_bytes * local_world_size
    if needed > left:
        most = left / local_world_size * world_size / GIB
        raise MemoryBudgetError(
            f"kv_offloading_size is {size_gib:g} GiB, of which the {local_world_size} ranks on this host take "
            f"{format_gib(needed)}; of its {format_gib(memory.total)} (of the container, if it has a limit) "
            f"{format_gib(memory.free)} are free, and {format_gib(promised_bytes * local_world_size)} of them belong "
            f"to the KV cache; lower it to at most {_short(most, math.floor)}"
        )
    return num_slots


def settle_host_slots(
    config: EngineConfig, codec: Codec, groups: RankGroups, capacity: KvCapacity, block_bytes: int, promised_bytes: int
) -> int:
    """Return the number of slots in every rank's host tier; ``promised_bytes`` is as in ``choose_slots``.  A
    collective."""
    info = groups.info
    num_slots = settle_slots(
        lambda: choose_slots(
            config.kv_offloading_size,
            codec.blob_bytes,
            world_size=info.world_size,
            local_world_size=info.local_world_size,
            promised_bytes=promised_bytes,
            memory=host_memory(),
        ),
        groups.host,
    )
    if info.is_first:
        num_bytes, num_tokens = num_slots * codec.blob_bytes, capacity.num_tokens(num_slots)
        logger.info(
            "Host KV cache: %s a rank, %s tokens; %d slots of %d bytes for blocks of %d bytes, codec %s",
            *(format_gib(num_bytes), f"{num_tokens:,}", num_slots, codec.blob_bytes, block_bytes),
            config.kv_offloading_codec,
        )
        if is_lossy(config.kv_offloading_codec):
            logger.info("the codec is lossy: K/V that come back differ a little, and so may answers")
    return num_slots


def _short(size_gib: float, rounded: Callable[[float], int]) -> str:
    """Three digits of ``size_gib``, rounded so that it is still a remedy; 0 for less than nothing."""
    if size_gib <= 0:
        return "0"
    scale = 10.0 ** (2 - math.floor(math.log10(size_gib)))
    return f"{rounded(size_gib * scale) / scale:g}"


class HostTierWorker(RunnerFeature):
    """A rank's slots, and what moves blocks between them and ``pool`` (blocks, block_bytes) uint8."""

    def __init__(
        self,
        pool: torch.Tensor,
        num_slots: int,
        codec: Codec,
        stores: TierProgress | None = None,
        progress: RankProgress | None = None,
    ) -> None:
        """``stores``: where stores are reported, if the codec may refuse some.

        Raises ``MemoryBudgetError`` if there is no memory, or if it cannot be pinned.
        """
        self._progress = progress or RankProgress()
        self._device, self._is_pinned = pool.device, False
        try:
            slots = map_zeros(num_slots * codec.blob_bytes).view(num_slots, codec.blob_bytes)
        except (OSError, OverflowError) as error:
            raise _no_memory(num_slots * codec.blob_bytes, str(error)) from error
        self.slots = slots
        self.disk: DiskTierWorker | None = None  # given when all ranks have theirs
        if pool.device.type == "cuda":
            self._pin()
        self._groups = BlockGroups(len(pool), num_slots, codec.num_groups) if codec.num_groups > 1 else None
        self._reports = None if stores is None else StoreReports(stores)
        self._mover: BlockMover = (CudaMover if self._is_pinned else BlockMover)(pool, slots, codec, self._reports)

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)
        hooks.report.append(self.report)
        hooks.memory.append(self.memory)
        hooks.check_sleep.append(self.check_sleep)
        hooks.close.append(self.close)

    def check_sleep(self) -> None:
        raise RequestError("an engine with a host tier cannot sleep: the tier would keep blocks; leave it out")

    def apply(self, plan: StepPlan) -> None:
        """Begin the plan's moves, then let its copies and its forward pass wait as it says."""
        if not (SECTIONS & plan.extensions.keys() or self._sees_all_plans):
            return
        self._progress.reach(RankPhase.MOVE)
        self._move(plan)
        self._progress.back(RankPhase.STEP_BEGIN)

    def memory(self) -> tuple[torch.Tensor, ...]:
        return (self.slots,)

    def _move(self, plan: StepPlan) -> None:
        stores, loads, reads, writes = (section.of(plan) for section in (STORES, LOADS, DISK_READS, DISK_WRITES))
        if len(stores) or len(loads):
            groups = self._groups
            self._mover.move(*((stores, loads) if groups is None else groups.moves(plan)))
        if self.disk is not None and (len(reads) or len(writes)):
            self.disk.begin(reads, writes, self._mover.past())
        if wait_load := WAIT_LOAD.of(plan):
            self._mover.wait(wait_load)
        if self._reports is not None:
            self._reports.send()
        if self._groups is not None:
            self._groups.note(plan)

    @property
    def _sees_all_plans(self) -> bool:
        """Whether plans without moves have to be applied too: they report stores, and say which group has a block."""
        return self._groups is not None or (self._reports is not None and self._reports.num_open > 0)

    @property
    def counters(self) -> MoveCounters:
        """What has been moved so far."""
        return self._mover.counters()

    def report(self) -> dict[str, Any]:
        return {"moves": self.counters, "disk_moves": None if self.disk is None else self.disk.counters}

    def close(self) -> None:
        """Wait for all moves and give the memory back, which must not be used again."""
        if self._is_pinned:
            torch.cuda.synchronize(self._device)
            _runtime().cudaHostUnregister(self.slots.data_ptr())
            self._is_pinned = False

    def _pin(self) -> None:
        status = int(_runtime().cudaHostRegister(self.slots.data_ptr(), self.slots.nbytes, 0))
        if status != 0:
            raise _no_memory(self.slots.nbytes, f"it cannot be pinned: CUDA error {status}")
        self._is_pinned = True


def _runtime() -> Any:
    """The functions of the CUDA runtime that PyTorch offers."""
    return torch.cuda.cudart()


def _no_memory(num_bytes: int, cause: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"cannot allocate {format_gib(num_bytes)} of host memory for KV blocks ({cause}); lower kv_offloading_size, "
        "or raise the limit of locked memory (ulimit -l)"
    )
