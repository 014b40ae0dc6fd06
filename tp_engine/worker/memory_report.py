"""The ledger and the cache as people and programs read them."""

from __future__ import annotations

import json

from tp_engine.units import format_gib
from tp_engine.worker.memory_ledger import MemoryLedger


def memory_lines(ledger: MemoryLedger, *, kv_cache_bytes: int) -> dict[str, int]:
    """The ledger and the cache that the ranks agreed on, in bytes by name."""
    return {**_terms(ledger), "kv_cache": kv_cache_bytes}


def _terms(ledger: MemoryLedger) -> dict[str, int]:
    return {
        "total": ledger.total,
        "requested": ledger.requested,
        "weights": ledger.weights,
        "activations": ledger.activations,
        "non_torch": ledger.non_torch,
        "tables": ledger.tables,
        "cuda_graphs": ledger.cuda_graphs,
        "kv_cache_available": ledger.available,
    }


def ledger_table(ledger: MemoryLedger, *, rank: int) -> str:
    """One rank's ledger as a table of GiB."""
    rows = (f"  {name.replace('_', ' '):<20}{format_gib(value):>14}" for name, value in _terms(ledger).items())
    return "\n".join((f"Memory of rank {rank}:", *rows))


def ledger_json(ledger: MemoryLedger, *, rank: int, num_blocks: int, kv_cache_bytes: int) -> str:
    """One rank's ledger as one line of JSON, in bytes, with the cache that the ranks agreed on."""
    return json.dumps({"rank": rank, **_terms(ledger), "num_kv_blocks": num_blocks, "kv_cache_bytes": kv_cache_bytes})
