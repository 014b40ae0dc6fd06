"""Whether ranks on CPUs share memory: the option, the agreement, and the case of a rank that cannot."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.distributed.test_symmetric_memory import HostOf
from tp_engine.config import ALL_REDUCES, EngineConfig
from tp_engine.cpu.library import native_library
from tp_engine.distributed import shared_memory
from tp_engine.distributed.all_reduce import STRATEGIES, Ranks, check, choose
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.reduce_plan import SHARED_SLOT_BYTES, shared_two_shot_bytes
from tp_engine.distributed.shared_memory import SharedMemoryCommunicator, _spin_s, with_shared_memory
from tp_engine.errors import ConfigError, RankError
from tp_engine.ipc import semaphore
from tp_engine.ipc.tensor_slots import TensorSlots
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo

needs_c = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")

ONE_HOST = RankInfo(world_size=4, local_world_size=4)
TWO_HOSTS = RankInfo(world_size=4, local_world_size=2)


@pytest.mark.parametrize(
    ("device", "all_reduce", "info", "expected"),
    [
        ("cpu", "auto", ONE_HOST, True),
        ("cpu", "shm", ONE_HOST, True),
        ("cpu", "gloo", ONE_HOST, False),
        ("cpu", "auto", TWO_HOSTS, True),
        ("cpu", "gloo", TWO_HOSTS, False),
        ("cpu", "auto", RankInfo(world_size=2, local_world_size=1), False),
        ("cpu", "auto", RankInfo(), False),
        ("cpu", "shm", RankInfo(), False),
        ("cuda", "auto", ONE_HOST, False),
    ],
)
def test_the_option(device: str, all_reduce: str, info: RankInfo, expected: bool) -> None:
    """Oracle: the choice by hand."""
    config = EngineConfig(device=device, all_reduce_backend=all_reduce, tensor_parallel_size=info.world_size)
    taken = choose(Ranks(config=config, num_hosts=info.topology.num_hosts))
    assert (taken is STRATEGIES["shm"]) == expected


def test_the_option_names_the_rows() -> None:
    """Oracle: the table; the configuration, which does not import torch, has its names too."""
    assert sorted(ALL_REDUCES) == sorted(("auto", *STRATEGIES))


def test_hosts_share_no_memory_with_each_other() -> None:
    """Oracle: each error names the option, the number of hosts and the remedy."""
    check(EngineConfig(device="cpu", all_reduce_backend="shm", tensor_parallel_size=4), 2)
    with pytest.raises(ConfigError, match=r"each host has one rank.*leave it out"):
        check(EngineConfig(device="cpu", all_reduce_backend="shm", tensor_parallel_size=2), 2)
    with pytest.raises(ConfigError, match=r"'symm_mem'.*on 2; leave all_reduce_backend out"):
        check(EngineConfig(device="cuda", all_reduce_backend="symm_mem", tensor_parallel_size=4), 2)


def test_two_ranks_never_take_two_shots() -> None:
    """Oracle: no piece is larger than a slot."""
    assert shared_two_shot_bytes(2) == SHARED_SLOT_BYTES > shared_two_shot_bytes(3) == shared_two_shot_bytes(8)


@pytest.mark.parametrize(
    ("cores", "spins"), [(({0, 1}, {0, 1}), True), (({0}, {1}), True), (({0}, {0}), False), (({3}, {3}, {4}), False)]
)
def test_ranks_that_share_a_core_do_not_spin(
    cores: tuple[set[int], ...], spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the spin needs as many cores as ranks, over all cores that any rank may use."""
    mine = threading.local()
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: mine.cores)

    def body(library: Communicator) -> float:
        mine.cores = cores[library.info.rank]
        return _spin_s(HostOf(library))

    assert [spin_s > 0 for spin_s in run_ranks(len(cores), body)] == [spins] * len(cores)


def setup(library: Communicator, *, is_required: bool = False) -> Communicator:
    return with_shared_memory(
        library, HostOf(library), RankProgress(), lambda: None, timeout_s=60, is_required=is_required, slot_bytes=4096
    )


@needs_c
@pytest.mark.parametrize("lacks", ["", "sem_clockwait"])
def test_ranks_that_can_do(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: sums and gathered tensors of the underlying library, after the setup's own check; also on a system
    before glibc 2.30, which lacks a function."""
    found = semaphore.functions()
    monkeypatch.setattr(semaphore, "functions", lambda: found | ({lacks: 0} if lacks else {}))

    def body(library: Communicator) -> None:
        made = setup(library)
        assert isinstance(made, SharedMemoryCommunicator) and made.info is library.info
        assert made.can_capture
        mine = torch.arange(5000, dtype=torch.float32).view(50, 100) + library.info.rank
        assert torch.equal(made.all_reduce(mine.clone()), library.all_reduce(mine.clone()))
        assert torch.equal(made.all_gather(mine[:3]), library.all_gather(mine[:3]))
        found, expected = (through.gather(mine.clone()) for through in (made, library))
        assert (found is None) == (expected is None)
        assert found is None or (expected is not None and torch.equal(found, expected))

    run_ranks(3, body)


@needs_c
@pytest.mark.parametrize("has_kernels", [(False, False), (True, False)])
def test_without_compiled_kernels_all_use_the_library(
    has_kernels: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the library itself on every rank, whichever of them lacks the kernels, and the reason in the log."""
    mine = threading.local()
    found = native_library()
    monkeypatch.setattr(shared_memory, "native_library", lambda: found if mine.has_kernels else None)
    caplog.set_level(logging.WARNING)

    def body(library: Communicator) -> bool:
        mine.has_kernels = has_kernels[library.info.rank]
        return setup(library) is library

    assert all(run_ranks(2, body))
    assert f"rank {has_kernels.index(False)}: RuntimeError: there are no compiled kernels here" in caplog.text


def test_more_ranks_than_fit_use_the_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the library itself on every rank, and the number in the log."""
    monkeypatch.setattr("tp_engine.distributed.shared_memory.MAX_RANKS", 1)
    caplog.set_level(logging.WARNING)
    assert all(run_ranks(2, lambda library: setup(library) is library))
    assert "2 ranks are on one host, and it takes at most 1" in caplog.text


@needs_c
@pytest.mark.parametrize("fails", ["create", "attach"])
def test_where_a_rank_can_not_all_use_the_library(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the library itself on every rank, and the reason in the log; an error if the user required sharing."""

    def fail(*_arguments: object) -> TensorSlots:
        raise RuntimeError("/dev/shm is too small")

    monkeypatch.setattr(TensorSlots, fails, fail)
    caplog.set_level(logging.WARNING)
    assert all(run_ranks(2, lambda library: setup(library) is library))
    culprit = 0 if fails == "create" else 1
    assert f"no shared memory, all-reduces go to the library: rank {culprit}: RuntimeError: /dev" in caplog.text

    def required(library: Communicator) -> str:
        with pytest.raises(RankError) as caught:
            setup(library, is_required=True)
        return str(caught.value)

    expected = (
        f"rank {culprit}: all_reduce_backend is shm, but shared memory failed: RuntimeError: /dev/shm is too small; use"
    )
    assert all(message.startswith(expected) for message in run_ranks(2, required))


@needs_c
def test_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: an error added on one rank makes all ranks use the library."""
    right = SharedMemoryCommunicator.all_reduce

    def wrong(self: SharedMemoryCommunicator, tensor: torch.Tensor) -> torch.Tensor:
        return right(self, tensor).add_(self.info.rank)

    monkeypatch.setattr(SharedMemoryCommunicator, "all_reduce", wrong)
    assert all(run_ranks(2, lambda library: setup(library) is library))
    assert "rank 1: RuntimeError: 1 numbers of torch.float32 gave another sum" in caplog.text
