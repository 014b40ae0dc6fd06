"""Device memory at the start, in order: snapshots, ledger, agreement of the ranks, report; then growth at run time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from tp_engine.distributed.rank import Agreeing, attempt
from tp_engine.errors import MemoryBudgetError
from tp_engine.job.topology import RankInfo
from tp_engine.model_config.kv_layout import KvCapacity, kv_cache_lines
from tp_engine.system.log import get_logger
from tp_engine.worker.device import Device, MemorySnapshot
from tp_engine.worker.memory.kv_cache import KvCacheShape, resident_bytes
from tp_engine.worker.memory.ledger import (
    MemoryLedger,
    blocks_that_fit,
    check_longest_request,
    compute_ledger,
    ledger_json,
    ledger_line,
    ledger_table,
    requested_bytes,
)

logger = get_logger(__name__)

_UNLIKE = 0.02  # ranks whose numbers of blocks differ by more have unlike devices, or share them
_MAX_BLOCKS = 1 << 40  # more is a bug in the counting


class MemoryMeter:
    """Takes the three snapshots: B0 when made, B1 at ``weights_loaded``, A at ``finish``.

    Call ``steps_begin`` between the last two, when what the steps need has been allocated.
    """

    def __init__(self, device: Device, *, utilization: float) -> None:
        """Raises ``MemoryBudgetError`` if the device has less free memory than ``utilization`` asks for."""
        self._device = device
        self._before = self._settled_snapshot()
        self._loaded: MemorySnapshot | None = None
        self._aside = 0
        self._requested = requested_bytes(self._before, utilization, is_shared=device.type == "cpu")

    def weights_loaded(self) -> None:
        """Measure what the weights take, once they are in place; the largest steps come next."""
        self._loaded = self._settled_snapshot()
        self._device.reset_peak()

    def steps_begin(self) -> None:
        """Measure what was allocated since ``weights_loaded``, which is for the largest steps alone; they come next."""
        assert self._loaded is not None, "weights_loaded() comes before steps_begin()"
        self._aside = self._device.snapshot().torch_allocated - self._loaded.torch_allocated
        self._device.reset_peak()

    def finish(self, **reserved: int) -> MemoryLedger:
        """End the largest steps; ``reserved`` are the computed lines of the ledger: bytes for later allocations,
        and those of the slots for adapters, which exist since the weights do."""
        assert self._loaded is not None, "weights_loaded() comes before finish()"
        self._device.synchronize()
        after, asked = self._device.snapshot(), self._requested
        return compute_ledger(self._before, self._loaded, after, requested=asked, aside=self._aside, **reserved)

    def _settled_snapshot(self) -> MemorySnapshot:
        gc.collect()
        self._device.synchronize()
        self._device.empty_cache()
        return self._device.snapshot()


def choose_blocks(
    ledger: MemoryLedger,
    shape: KvCacheShape,
    *,
    num_blocks_override: int | None = None,
    cache_bytes_override: int | None = None,
) -> int:
    """Return this rank's number of KV blocks: the override in blocks or in bytes, or what the ledger leaves."""
    if num_blocks_override is not None:
        wanted = num_blocks_override * shape.block_bytes
        if wanted > ledger.available:
            logger.warning("num_gpu_blocks_override takes %d bytes; profiling found %d", wanted, ledger.available)
        return num_blocks_override
    if cache_bytes_override is None:
        return blocks_that_fit(ledger, shape.block_bytes)
    if cache_bytes_override < shape.block_bytes:
        raise MemoryBudgetError(
            f"kv_cache_memory_bytes is {cache_bytes_override}; one block takes {shape.block_bytes} bytes: raise it"
        )
    return cache_bytes_override // shape.block_bytes


def settle_blocks(
    choose: Callable[[], int], group: Agreeing, shape: KvCacheShape, capacity: KvCapacity, *, is_override: bool
) -> int:
    """Return the number of KV blocks of every rank.  ``choose`` finds this rank's own; if it fails, every rank fails.

    A user's number of blocks may be too small for ``max_model_len``: requests are then at most as long as the blocks
    allow (``engine/build.py``).  Otherwise too few blocks raise ``MemoryBudgetError``.
    """
    num_blocks = settle_slots(choose, group, of="KV cache")
    if not is_override:
        check_longest_request(capacity, num_blocks=num_blocks, block_bytes=shape.block_bytes)
    return num_blocks


def log_memory(
    ledger: MemoryLedger, shape: KvCacheShape, capacity: KvCapacity, info: RankInfo, *, num_blocks: int
) -> None:
    """Log the report: a line of each host's first rank, each rank's ledger as a table and as JSON for debugging, then
    rank 0's three lines on the cache."""
    logger.log(logging.INFO if info.local_rank == 0 else logging.DEBUG, "%s", ledger_line(ledger, info))
    logger.debug("%s", ledger_table(ledger, info))
    num_bytes = num_blocks * shape.block_bytes
    report = ledger_json(ledger, info, num_blocks=num_blocks, kv_cache_bytes=num_bytes)
    logger.debug("memory: %s", report)
    if info.is_first:
        lines = kv_cache_lines(
            num_bytes=num_bytes, num_tokens=capacity.num_tokens(num_blocks), max_model_len=capacity.max_model_len
        )
        for line in lines:
            logger.info("%s", line)


class MemoryMonitor:
    """Growth of this process's memory since this object was made, when the rank became ready."""

    def __init__(self, device: Device, *kv_memory: torch.Tensor) -> None:
        """``kv_memory``: blocks of K/V, which on a CPU take pages as they come into use."""
        self._device = device
        self._kv_memory = kv_memory
        self._ready_bytes = self._own_bytes()

    def growth(self) -> int:
        """Bytes more than when the rank became ready.  Pages of a CPU cache that come into use are not growth."""
        return self._own_bytes() - self._ready_bytes

    def _own_bytes(self) -> int:
        snapshot = self._device.snapshot()
        in_cache = sum(map(resident_bytes, self._kv_memory)) if self._device.type == "cpu" else 0
        return snapshot.torch_reserved + snapshot.non_torch - in_cache


def settle_slots(choose: Callable[[], int], group: Agreeing, *, of: str = "host tier") -> int:
    """Return the smallest number of blocks, or of a tier's slots, of all ranks; ``choose`` finds this rank's own.

    Every rank calls this.  Raises ``MemoryBudgetError`` naming every rank that failed, with its cause, on all ranks
    alike.
    """
    own, failure, causes = attempt(group, choose)
    counts = [int(count) for count in group.all_gather_bytes(str(own or 0).encode())]
    for rank, count in enumerate(counts):
        if rank not in causes and not 0 < count <= _MAX_BLOCKS:
            causes[rank] = f"it counted {count} KV blocks, where 1 to {_MAX_BLOCKS} are possible"
    info, named, num_blocks = group.info, group.info.topology.named, min(counts)
    if causes:
        failed = [f"{named(rank)}: {cause}" for rank, cause in sorted(causes.items())]
        raise MemoryBudgetError(
            f"{len(failed)} of {info.world_size} ranks could not provide a {of}: {'; '.join(failed)}", rank=min(causes)
        ) from failure
    if info.is_first and info.world_size > 1:
        level = logging.INFO if max(counts) - num_blocks > num_blocks * _UNLIKE else logging.DEBUG
        text = "blocks of the %s: %d on every rank (limited by %s; the roomiest has %d)"
        logger.log(level, text, of, num_blocks, named(counts.index(num_blocks)), max(counts))
    return num_blocks
