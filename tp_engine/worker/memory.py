"""Start-up's account of device memory, in order: snapshots, ledger, agreement, report; then growth while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from tp_engine.errors import MemoryBudgetError
from tp_engine.kv_layout import KvCapacity, kv_cache_lines
from tp_engine.log import get_logger
from tp_engine.worker.device import Device, MemorySnapshot
from tp_engine.worker.kv_cache import KvCacheShape, resident_bytes
from tp_engine.worker.memory_agreement import AgreementGroup, agree_on_blocks
from tp_engine.worker.memory_ledger import (
    MemoryLedger,
    blocks_that_fit,
    check_longest_request,
    compute_ledger,
    requested_bytes,
)
from tp_engine.worker.memory_report import ledger_json, ledger_table

logger = get_logger(__name__)


class MemoryProfiler:
    """Takes the three snapshots: B0 when made, B1 at ``weights_loaded``, A at ``finish``.

    ``steps_begin`` between the last two where something was allocated for the steps that does not stay.
    """

    def __init__(self, device: Device, *, utilization: float) -> None:
        """Raises ``MemoryBudgetError`` if the device has not free what ``utilization`` asks for."""
        self._device = device
        self._before = self._settled_snapshot()
        self._loaded: MemorySnapshot | None = None
        self._aside = 0
        self._requested = requested_bytes(self._before, utilization, is_shared=device.type == "cpu")

    def weights_loaded(self) -> None:
        """The weights are in place; the largest steps come next."""
        self._loaded = self._settled_snapshot()
        self._device.reset_peak()

    def steps_begin(self) -> None:
        """The largest steps come next; what was allocated since ``weights_loaded`` is for them alone."""
        assert self._loaded is not None, "weights_loaded() comes before steps_begin()"
        self._aside = self._device.snapshot().torch_allocated - self._loaded.torch_allocated
        self._device.reset_peak()

    def finish(self, *, table_bytes: int = 0, cuda_graph_bytes: int = 0) -> MemoryLedger:
        """The largest steps have run; ``table_bytes`` and ``cuda_graph_bytes`` are set aside for what comes later."""
        assert self._loaded is not None, "weights_loaded() comes before finish()"
        self._device.synchronize()
        after = self._device.snapshot()
        return compute_ledger(
            self._before,
            self._loaded,
            after,
            requested=self._requested,
            tables=table_bytes,
            cuda_graphs=cuda_graph_bytes,
            aside=self._aside,
        )

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
    """This rank's number of KV blocks: the override in blocks, that in bytes, or what the ledger leaves."""
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
    choose: Callable[[], int],
    group: AgreementGroup,
    shape: KvCacheShape,
    capacity: KvCapacity,
    *,
    is_override: bool,
) -> int:
    """The number of KV blocks of every rank.  ``choose`` finds this rank's own; its failure is every rank's.

    A number of blocks given by the user may be too small for ``max_model_len``: the scheduler then refuses longer
    requests.  Otherwise that raises ``MemoryBudgetError``.
    """
    local: int | Exception
    try:
        local = choose()
    except Exception as error:
        local = error
    num_blocks = agree_on_blocks(local, group).num_blocks
    if not is_override:
        check_longest_request(capacity, num_blocks=num_blocks, block_bytes=shape.block_bytes)
    elif num_blocks < capacity.blocks_per_request and group.info.is_first:
        logger.warning(
            "num_gpu_blocks_override %d holds %d tokens: longer requests are refused although max_model_len is %d",
            num_blocks,
            capacity.longest_request(num_blocks),
            capacity.max_model_len,
        )
    return num_blocks


def log_memory(ledger: MemoryLedger, shape: KvCacheShape, capacity: KvCapacity, *, rank: int, num_blocks: int) -> None:
    """The report: each rank's ledger as a table and as JSON, then rank 0's three lines on the cache."""
    logger.info("%s", ledger_table(ledger, rank=rank))
    num_bytes = num_blocks * shape.block_bytes
    report = ledger_json(ledger, rank=rank, num_blocks=num_blocks, kv_cache_bytes=num_bytes)
    logger.info("memory: %s", report)
    if rank == 0:
        lines = kv_cache_lines(
            num_bytes=num_bytes,
            num_tokens=capacity.num_tokens(num_blocks),
            max_model_len=capacity.max_model_len,
        )
        for line in lines:
            logger.info("%s", line)


class MemoryMonitor:
    """Growth of this process's memory since it was made, which is when the rank is ready: after the warm-up."""

    def __init__(self, device: Device, *kv_tensors: torch.Tensor) -> None:
        """``kv_tensors``: the cache, and its scales if it has some."""
        self._device = device
        self._kv_tensors = kv_tensors
        self._ready_bytes = self._own_bytes()

    def growth(self) -> int:
        """Bytes more than when the rank became ready.  Pages of a CPU cache that come into use are not growth."""
        return self._own_bytes() - self._ready_bytes

    def _own_bytes(self) -> int:
        snapshot = self._device.snapshot()
        in_cache = sum(map(resident_bytes, self._kv_tensors)) if self._device.type == "cpu" else 0
        return snapshot.torch_reserved + snapshot.non_torch - in_cache
