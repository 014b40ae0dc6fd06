"""The KV cache's share of a device: arithmetic over three snapshots, and its report.

::

    B0  nothing loaded     B1  weights loaded     A  the largest steps have run

    requested   = total * gpu_memory_utilization
    weights     = torch allocated in B1 - in B0 - adapters
    activations = torch peak in A - torch allocated before the steps
    non-torch   = non-torch in A - in B0
    tables      = what the rows keep on the device: token ids, block table, sampling; a codec's staging; computed
    states      = recurrent states of all rows, and snapshots, of models that have some; computed
    adapters    = slots for adapters, max_loras of the largest rank; computed, and not among the weights
    images      = encoder cache: rows of images that prompts still need; computed
    KV cache    = requested - weights - activations - non-torch - tables - CUDA graphs - states - adapters - images

Every term counts this process only; the memory of other processes is in none of them.
"""

import json
from dataclasses import asdict, dataclass

from tp_engine.errors import MemoryBudgetError
from tp_engine.job.topology import RankInfo
from tp_engine.model_config.kv_layout import KvCapacity
from tp_engine.system.units import GIB, format_gib
from tp_engine.worker.device import MemorySnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Where one rank's share of its device goes, in bytes.  ``available`` for the KV cache may be negative."""

    total: int
    requested: int
    weights: int
    activations: int
    non_torch: int
    tables: int = 0
    cuda_graphs: int = 0
    states: int = 0
    adapters: int = 0
    images: int = 0

    @property
    def available(self) -> int:
        """What is left for the KV cache."""
        measured = self.weights + self.activations + self.non_torch + self.cuda_graphs
        return self.requested - measured - self.tables - self.states - self.adapters - self.images


def requested_bytes(before: MemorySnapshot, utilization: float, *, is_shared: bool) -> int:
    """Return the bytes that this engine may use of the device, as found in B0.

    Raises ``MemoryBudgetError`` if they are not free.  A host's memory (``is_shared``) is used by other programs and
    rarely free to 90 %: there the engine takes the same share of the free memory instead.
    """
    requested = int(before.total * utilization)
    if requested <= before.free:
        return requested
    if is_shared:
        return int(before.free * utilization)
    highest = int(before.free / before.total * 100) / 100
    raise MemoryBudgetError(
        f"gpu_memory_utilization {utilization:g} asks for {format_gib(requested)} of the device's "
        f"{format_gib(before.total)}, but only {format_gib(before.free)} are free; lower it to at most {highest:g}, or "
        "end the processes that use the device"
    )


def compute_ledger(
    before: MemorySnapshot,
    loaded: MemorySnapshot,
    after: MemorySnapshot,
    *,
    requested: int,
    aside: int = 0,
    **reserved: int,
) -> MemoryLedger:
    """Return the ledger of the snapshots B0, B1 and A, and of the ``reserved`` lines.  A term that decreased counts as
    zero.

    ``aside``: bytes that torch held in addition to B1 for the trial steps, such as their small KV cache.
    """
    return MemoryLedger(
        total=before.total,
        requested=requested,
        weights=max(loaded.torch_allocated - before.torch_allocated - reserved.get("adapters", 0), 0),
        activations=max(after.torch_peak - loaded.torch_allocated - aside, 0),
        non_torch=max(after.non_torch - before.non_torch, 0),
        **reserved,
    )


def blocks_that_fit(ledger: MemoryLedger, block_bytes: int) -> int:
    """Blocks that the ledger leaves room for; raises ``MemoryBudgetError`` if there is none."""
    if ledger.available >= block_bytes:
        return ledger.available // block_bytes
    raise MemoryBudgetError(
        f"no memory is left for the KV cache: of the {format_gib(ledger.requested)} requested, weights take "
        f"{format_gib(ledger.weights)}, activations {format_gib(ledger.activations)}, non-torch memory "
        f"{format_gib(ledger.non_torch)}, tables {format_gib(ledger.tables)}, recurrent states of the rows "
        f"{format_gib(ledger.states)}, adapters {format_gib(ledger.adapters)}, encoded images "
        f"{format_gib(ledger.images)} and CUDA graphs {format_gib(ledger.cuda_graphs)}, leaving {ledger.available} "
        f"bytes where one block takes {block_bytes}; raise gpu_memory_utilization, lower max_num_batched_tokens or "
        "max_num_seqs, or raise tensor_parallel_size"
    )


def check_longest_request(capacity: KvCapacity, *, num_blocks: int, block_bytes: int) -> None:
    """Raise ``MemoryBudgetError`` unless one request of ``max_model_len`` tokens fits in ``num_blocks``."""
    needed = capacity.blocks_per_request
    if needed <= num_blocks:
        return
    raise MemoryBudgetError(
        f"one request of max_model_len {capacity.max_model_len} needs {needed} KV blocks "
        f"({format_gib(needed * block_bytes)} a rank), but only {num_blocks} "
        f"({format_gib(num_blocks * block_bytes)}) fit; lower max_model_len to at most "
        f"{capacity.longest_request(num_blocks)}, raise gpu_memory_utilization or kv_cache_memory_bytes, or raise "
        "tensor_parallel_size"
    )


def memory_lines(ledger: MemoryLedger, *, kv_cache_bytes: int, kv_host_bytes: int) -> dict[str, int]:
    """Return the ledger, and the cache and the host tier that the ranks agreed on, in bytes by name."""
    return {**_terms(ledger), "kv_cache": kv_cache_bytes, "kv_host": kv_host_bytes}


def _terms(ledger: MemoryLedger) -> dict[str, int]:
    return {**asdict(ledger), "kv_cache_available": ledger.available}


def ledger_line(ledger: MemoryLedger, info: RankInfo) -> str:
    """Return one rank's ledger in a line, with what takes a hundredth of it or more."""
    terms = _terms(ledger)
    total, requested = terms.pop("total"), terms.pop("requested")
    large = [
        f"{name.replace('_', ' ').removesuffix(' available')} {value / GIB:.2f}"
        for name, value in terms.items()
        if value * 100 >= requested
    ]
    name = info.topology.named(info.rank)
    return f"memory of {name}: {requested / GIB:.2f} of {total / GIB:.2f} GiB: {', '.join(large)}"


def ledger_table(ledger: MemoryLedger, info: RankInfo) -> str:
    """Return one rank's ledger as a table of GiB."""
    rows = (f"  {name.replace('_', ' '):<20}{format_gib(value):>14}" for name, value in _terms(ledger).items())
    return "\n".join((f"Memory of {info.topology.named(info.rank)}:", *rows))


def ledger_json(ledger: MemoryLedger, info: RankInfo, *, num_blocks: int, kv_cache_bytes: int) -> str:
    """Return one rank's ledger as one line of JSON, in bytes, with the cache that the ranks agreed on."""
    place = {"rank": info.rank, "host": info.topology.host_of(info.rank)}
    return json.dumps({**place, **_terms(ledger), "num_kv_blocks": num_blocks, "kv_cache_bytes": kv_cache_bytes})
