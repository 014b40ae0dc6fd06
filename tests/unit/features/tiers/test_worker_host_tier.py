"""The host tier's memory on a rank: how many slots, refusals, agreement, pinning, and giving it back."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kv_tiers import moves
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, MemoryBudgetError
from tp_engine.features.tiers.codecs.base import BlockCopy
from tp_engine.features.tiers.rank_host import HostTierWorker, choose_slots
from tp_engine.kernels.huge_pages import HUGE_PAGE
from tp_engine.plan import StepPlan
from tp_engine.system.units import GIB, MIB
from tp_engine.worker.memory.host_memory import HostMemory
from tp_engine.worker.memory.kv_cache import resident_bytes

COPY = BlockCopy(MIB, "any")
ROOMY = HostMemory(total=64 * GIB, free=48 * GIB)


def slots(size_gib: float, block_bytes: int = MIB, **changes: Any) -> int:
    """``choose_slots`` for two ranks on one host."""
    given: dict[str, Any] = {"world_size": 2, "local_world_size": 2, "promised_bytes": 0, "memory": ROOMY}
    return choose_slots(size_gib, block_bytes, **(given | changes))


def test_size_is_that_of_all_ranks() -> None:
    """Oracle: by hand: 4 GiB are 2,048 slots of 1 MiB on each of two ranks; a rest of less than a block is left."""
    assert slots(4) == 2048 and slots(4, world_size=1, local_world_size=1) == 4096
    assert slots(1.5, 7 * MIB) == 768 // 7
    assert slots(96, world_size=4) == 24 * 1024  # two of four ranks are on this host: 48 GiB


def test_too_small_a_size_is_refused_with_the_least() -> None:
    """Oracle: by hand: a block of 1 MiB on each of two ranks is 2 MiB, 0.00195 GiB; that much is accepted."""
    with pytest.raises(
        MemoryBudgetError, match=r"is 0.001 GiB, which 2 ranks share.*1048576 bytes; raise it to at"
    ) as e:
        slots(0.001)
    least = float(str(e.value).split("at least ")[1].split(",")[0])
    assert slots(least) == 1


@pytest.mark.parametrize(("promised", "most"), [(0, 48), (8 * GIB, 32)])
def test_too_large_a_size_is_refused_with_the_most(promised: int, most: int) -> None:
    """Oracle: by hand: 48 GiB are free, less what two pools on a CPU will use; that much is accepted."""
    with pytest.raises(MemoryBudgetError, match=rf"is 49 GiB.*64.00 GiB.*48.00 GiB are free.*at most {most}$"):
        slots(49, promised_bytes=promised)
    assert slots(most, promised_bytes=promised) == most * 512


def test_nothing_left_is_an_error_and_no_negative_remedy() -> None:
    """Oracle: the rule."""
    with pytest.raises(MemoryBudgetError, match=r"lower it to at most 0$"):
        slots(1, promised_bytes=40 * GIB)


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_size_that_is_no_size(size: float) -> None:
    """Oracle: the value, the rule and the remedy."""
    with pytest.raises(ConfigError, match=r"kv_offloading_size is .*; it must be at least 0"):
        EngineConfig(kv_offloading_size=size)


def test_tier_without_a_prefix_cache_is_refused() -> None:
    """Oracle: both settings are named; either remedy is accepted."""
    with pytest.raises(ConfigError, match="enable_prefix_caching is off: switch it on, or set kv_offloading_size to 0"):
        EngineConfig(kv_offloading_size=4, enable_prefix_caching=False)
    EngineConfig(kv_offloading_size=4)
    EngineConfig(enable_prefix_caching=False)


def test_pages_come_into_use_with_their_slots() -> None:
    """Oracle: 1 GiB of slots occupies nothing at first, then the page of the slot that is stored."""
    tier = HostTierWorker(torch.ones(2, MIB, dtype=torch.uint8), 1024, COPY)
    assert resident_bytes(tier.slots) == 0
    tier.apply(StepPlan(step_id=1, extensions=moves(stores=torch.tensor([[1, 512]], dtype=torch.int32).numpy())))
    assert bool((tier.slots[512] == 1).all()) and MIB <= resident_bytes(tier.slots) <= 2 * HUGE_PAGE
    assert tier.counters.stored_bytes == MIB


def test_too_large_a_tier_is_a_budget_error() -> None:
    """Oracle: our error with the remedy, not the allocator's own."""
    with pytest.raises(MemoryBudgetError, match=r"GiB of host memory for KV blocks \(.*lower kv_offloading_size"):
        HostTierWorker(torch.ones(1, MIB, dtype=torch.uint8), 10**12, COPY)


def test_memory_is_given_back() -> None:
    """Oracle: the slots are gone with the tier."""
    tier = HostTierWorker(torch.ones(1, MIB, dtype=torch.uint8), 8, COPY)
    memory = weakref.ref(tier.slots.untyped_storage())
    tier.close()
    del tier
    gc.collect()
    assert memory() is None


class Runtime:
    """CUDA's registration of host memory."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0 and address % 4096 == 0
        self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def on_cuda(monkeypatch: pytest.MonkeyPatch, status: int) -> tuple[Any, Runtime, list[Any]]:
    """A pool that says it is on a GPU, the runtime, and what was waited for."""
    runtime, waited = Runtime(status), list[Any]()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.Stream", lambda _device: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
    pool = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(4, 3 * MIB))
    return pool, runtime, waited


def test_pinned_memory_has_the_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: bytes that are registered, which PyTorch's own allocator would round up to a power of two; after close
    nothing is registered, and the device has been waited for before; a second close does nothing."""
    pool, runtime, waited = on_cuda(monkeypatch, 0)
    tier = HostTierWorker(pool, 5, BlockCopy(3 * MIB, "any"))
    assert runtime.pinned == {tier.slots.data_ptr(): 15 * MIB}
    tier.close()
    tier.close()
    assert runtime.pinned == {} and waited == [pool.device]


def test_memory_that_can_not_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: our error with CUDA's number and the remedies."""
    pool, _, _ = on_cuda(monkeypatch, 2)
    with pytest.raises(MemoryBudgetError, match=r"it cannot be pinned: CUDA error 2\); lower kv_offl.*ulimit -l"):
        HostTierWorker(pool, 5, BlockCopy(3 * MIB, "any"))
