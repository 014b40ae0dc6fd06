"""The choice of all-reduces, and the communicator and its setup with a stand-in for the GPUs' shared memory."""

from __future__ import annotations

import dataclasses
import re
import time
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch

from tests.fake_gpus import FakeGpus
from tests.simulated_ranks import run_ranks
from tp_engine.config import EngineConfig
from tp_engine.distributed import symmetric_memory
from tp_engine.distributed.all_reduce import STRATEGIES, Ranks, agreed_machine, choose, probe_devices
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.distributed.groups import alone
from tp_engine.distributed.reduce_plan import Machine, RecordedSizes, ReducePlan, plan_reduces, why_not
from tp_engine.distributed.symmetric_memory import (
    SymmetricCommunicator,
    has_native_atomics,
    probe_machine,
    with_symmetric_memory,
)
from tp_engine.errors import ConfigError, RankError
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.system.units import KIB, MIB

H200 = Machine(
    world_size=4, capability=(9, 0), has_peer_access=True, has_peer_atomics=True, has_multicast=True, has_triton=True
)
SMALL = ReducePlan(one_shot_bytes=64, two_shot_bytes=128, multimem_bytes=0, gather_bytes=96)


class FakeBuffer:
    """Adds and gathers through the simulated ranks; ``error`` is added to every sum, ``shift`` to what is gathered.

    ``loses_writes``: what it writes into other ranks' memory does not arrive.  ``reads_late``: it finds in the others'
    memory what they gather next.
    """

    def __init__(
        self,
        through: Communicator,
        *,
        error: float = 0.0,
        shift: int = 0,
        has_multicast: bool = True,
        loses_writes: bool = False,
        reads_late: bool = False,
    ) -> None:
        self.has_multicast = has_multicast
        self.addresses = self.signals = torch.zeros(through.info.world_size, dtype=torch.int64)
        self.calls: list[tuple[str, int]] = []
        self._through, self._error, self._shift, self._loses_writes = through, error, shift, loses_writes
        self._reads_late, self._gathered = reads_late, torch.empty(0)

    def of(self, rank: int) -> torch.Tensor:
        memory: torch.Tensor = getattr(self._through, "memories")[rank]  # noqa: B009 - of simulated ranks only
        return memory.clone() if self._loses_writes and rank != self._through.info.rank else memory

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.dim() == 1 and tensor.nbytes % 16 == 0
        self.calls.append((name, tensor.nbytes))
        self._through.all_reduce(tensor).add_(self._error)

    def one_shot(self, tensor: torch.Tensor) -> None:
        self._add("one_shot", tensor)

    def two_shot(self, tensor: torch.Tensor) -> None:
        self._add("two_shot", tensor)

    def multimem(self, tensor: torch.Tensor) -> None:
        self._add("multimem", tensor)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        assert part.dim() == 1 and part.dtype == torch.int64 and part.is_contiguous()
        self.calls.append(("all_gather", part.nbytes))
        whole = self._through.all_gather(part).add_(self._shift).view(self._through.info.world_size, -1)
        if self._reads_late and self._gathered.shape == whole.shape:
            self._gathered.copy_(whole)
        self._gathered = whole
        return whole


class FakeMemory:
    """A rank's buffer; sharing it fails with ``fault``, if there is one."""

    def __init__(self, buffer: FakeBuffer, *, fault: str = "") -> None:
        self._buffer, self._fault, self.was_shared = buffer, fault, False

    def __call__(self) -> FakeBuffer:
        self.was_shared = True
        if self._fault:
            raise RuntimeError(self._fault)
        return self._buffer


class HostOf:
    """The host's collective, over simulated ranks: payloads of at most 1000 bytes."""

    def __init__(self, through: Communicator) -> None:
        self.info, self._through = through.info, through

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        framed = torch.tensor([*payload.ljust(1000, b"\0")[:1000]], dtype=torch.uint8)
        return [bytes(part.tolist()).rstrip(b"\0") for part in torch.split(self._through.all_gather(framed), 1000)]


@pytest.mark.parametrize(
    ("change", "largest", "sizes"),
    [
        ({}, 1 << 30, {16: "ONE_SHOT", 512 * KIB: "ONE_SHOT", 513 * KIB: "MULTIMEM", 32 * MIB: "MULTIMEM"}),
        ({}, 1 << 30, {33 * MIB: "LIBRARY", 8: "LIBRARY", 1 * MIB + 2: "LIBRARY", 0: "LIBRARY"}),
        ({"has_multicast": False}, 1 << 30, {513 * KIB: "TWO_SHOT", 8 * MIB: "TWO_SHOT", 9 * MIB: "LIBRARY"}),
        ({"capability": (8, 0)}, 1 << 30, {512 * KIB: "ONE_SHOT", 8 * MIB: "TWO_SHOT", 9 * MIB: "LIBRARY"}),
        ({"world_size": 2}, 1 << 30, {1 * MIB: "ONE_SHOT", 2 * MIB: "TWO_SHOT", 9 * MIB: "LIBRARY"}),
        ({"world_size": 8}, 1 << 30, {256 * KIB: "ONE_SHOT", 257 * KIB: "MULTIMEM"}),
        ({}, 1000, {992: "ONE_SHOT", 1008: "ONE_SHOT", 1024: "LIBRARY"}),
    ],
)
def test_the_method_follows_from_size_and_machine(change: dict[str, Any], largest: int, sizes: dict[int, str]) -> None:
    """Oracle: the table in reduce_plan's docstring and its limits."""
    plan = plan_reduces(dataclasses.replace(H200, **change), largest)
    assert {size: plan.choose(size).name for size in sizes} == sizes
    assert all(size <= plan.reduce_bytes for size, name in sizes.items() if name != "LIBRARY")


@pytest.mark.parametrize(("world_size", "largest"), [(2, 8 * MIB), (4, 4 * MIB), (8, 2 * MIB)])
def test_the_largest_all_gather_follows_from_the_machine(world_size: int, largest: int) -> None:
    """Oracle: 16 MiB of all ranks, by hand; the buffer has room for a part; without Triton there is no kernel."""
    machine = dataclasses.replace(H200, world_size=world_size)
    plan = plan_reduces(machine, 1000)
    assert [plan.gathers(size) for size in (0, 4, 8, largest, largest + 8)] == [False, False, True, True, False]
    assert plan.buffer_bytes == largest and plan.reduce_bytes == 1008
    without = plan_reduces(dataclasses.replace(machine, has_triton=False), 1000)
    assert not without.gathers(8) and without.buffer_bytes == 1008


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({}, "bfloat16", None),
        ({"has_multicast": False, "capability": (8, 0), "world_size": 2}, "float32", None),
        ({"world_size": 3}, "bfloat16", "2, 4, 8 ranks, and there are 3"),
        ({}, "float16", "dtype is float16"),
        ({"capability": (7, 5)}, "bfloat16", "capability 8.0, and one is of 7.5"),
        ({"has_peer_access": False}, "bfloat16", "cannot read each other's memory.*NCCL_P2P_DISABLE"),
        ({"has_peer_atomics": False}, "bfloat16", r"signals to each other may be lost.*p2p a\)"),
    ],
)
def test_what_keeps_ranks_from_it(change: dict[str, Any], dtype: str, message: str | None) -> None:
    """Oracle: the reason, or None."""
    found = why_not(dataclasses.replace(H200, **change), dtype)
    assert found is None if message is None else found is not None and re.search(message, found)


def test_atomics_between_gpus_are_the_driver_s_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: two GPUs by hand.  Without a driver, or if a call fails, there are none; one direction is not enough, and
    a GPU of several ranks has no link."""
    gpus = FakeGpus(2, atomics=frozenset({(1, 0)})).install(monkeypatch)
    assert has_native_atomics(1, 0) and not has_native_atomics(0, 1)
    found = probe_machine((0, 1))
    assert found.has_peer_access and not found.has_peer_atomics
    for name, value in (("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not probe_machine((0, 1)).has_peer_access
    assert probe_machine((0, 0)).has_peer_atomics
    gpus.atomics |= {(0, 1)}
    assert probe_machine((0, 1)).has_peer_atomics
    gpus.status = 100
    assert not has_native_atomics(1, 0)
    gpus.driver, gpus.status = None, 0
    assert not has_native_atomics(1, 0)


@pytest.mark.parametrize("chosen", ["CUDA", "NVSHMEM", None])
def test_memory_is_of_the_backend_whose_handles_have_addresses(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Oracle: what a stand-in for torch was asked; a backend that is set already is left alone."""
    asked: list[str] = []
    from torch.distributed import _symmetric_memory as torch_module

    monkeypatch.setattr(torch_module, "get_backend", lambda device: chosen)
    monkeypatch.setattr(torch_module, "set_backend", asked.append)
    monkeypatch.setattr(
        torch_module._SymmetricMemory, "empty_strided_p2p", lambda *shape: asked.append("memory"), raising=False
    )
    symmetric_memory.allocate_symmetric(64, torch.device("cuda", 0), None)  # type: ignore[arg-type]
    assert asked == (["memory"] if chosen == "CUDA" else ["CUDA", "memory"])


def test_ranks_agree_on_what_their_gpus_can_do() -> None:
    """Oracle: what holds on every rank, the least of two answers by hand."""

    other = dataclasses.replace(H200, capability=(8, 6), has_peer_atomics=False, has_triton=False)

    class TwoRanks:
        info = RankInfo(world_size=2, local_world_size=2)

        def all_gather_bytes(self, payload: bytes) -> list[bytes]:
            return [payload, msgspec.json.encode(other)]

    found = agreed_machine(H200, TwoRanks())
    assert found == dataclasses.replace(H200, capability=(8, 6), has_peer_atomics=False, has_triton=False)


CUDA: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"all_reduce_backend": "nccl"}, False),
        ({"all_reduce_backend": "symm_mem"}, True),
        ({"device_ids": "0,0,0,0"}, False),
        ({"device_ids": "0,0,0,0", "all_reduce_backend": "symm_mem"}, True),
        ({"dtype": "float16"}, False),
        ({"dtype": "float16", "all_reduce_backend": "symm_mem"}, "'symm_mem', .*dtype is float16; .*use nccl"),
        ({"device_ids": "0,0,0,0", "all_reduce_backend": "nccl"}, "refuses ranks that share a GPU.*symm_mem"),
        ({"device": "cpu", "all_reduce_backend": "nccl"}, "run on the CPU; leave it out"),
        ({"all_reduce_backend": "shm"}, "'shm', which is for CPUs, but the ranks run on GPUs; leave it out"),
        ({"all_reduce_backend": "gloo"}, "'gloo', which is for CPUs"),
    ],
)
def test_the_option(options: dict[str, Any], expected: bool | str) -> None:
    """Oracle: the choice by hand, on four GPUs that share memory."""
    config = EngineConfig(**(CUDA | options))
    if isinstance(expected, bool):
        assert (choose(Ranks(config=config, machine=H200)) is STRATEGIES["symm_mem"]) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            choose(Ranks(config=config, machine=H200))


def test_one_rank_and_cpus_have_nothing_to_share() -> None:
    """Oracle: no probe and no sharing."""
    for options in ({"device": "cpu"}, {"tensor_parallel_size": 1}):
        config = EngineConfig(**(CUDA | options))
        taken = choose(Ranks(config=config, machine=probe_devices(config)))
        assert taken is None or taken is STRATEGIES["shm"]


def test_all_reduces_take_their_way() -> None:
    """Oracle: 1 + 2, for the sizes, types and layouts of every path; rank 0's gathers are the library's."""
    shared = [torch.ones(2, 8), torch.ones(4, 8)]
    not_shared = [torch.ones(9, 4), torch.ones(8, dtype=torch.float64), torch.ones(4, 8).t(), torch.ones(3)]

    def body(library: Communicator) -> None:
        buffer, number = FakeBuffer(library), library.info.rank + 1
        communicator = SymmetricCommunicator(library, buffer, SMALL, RankProgress())
        for ones in (*shared, *not_shared):
            mine = ones * number
            assert communicator.all_reduce(mine) is mine and torch.equal(mine, ones * 3)
        shifted = torch.full((9,), float(number))[1:]
        assert torch.equal(communicator.all_reduce(shifted), torch.full((8,), 3.0))
        assert buffer.calls == [("one_shot", 64), ("two_shot", 128)]
        assert (communicator.gather(torch.ones(2)) is None) == (library.info.rank > 0)

    run_ranks(2, body)


def test_all_gathers_take_their_way() -> None:
    """Oracle: the library's result, for the sizes, types and layouts of both paths."""
    shared = [torch.arange(12), torch.ones(2, 8), torch.ones(2, 2, 3, dtype=torch.float64), torch.ones(3, 4).t()]
    shared += [torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)]
    not_shared = [torch.arange(13), torch.ones(3), torch.ones(0), torch.ones(2, 3).bfloat16()]

    def body(library: Communicator) -> None:
        buffer = FakeBuffer(library)
        communicator = SymmetricCommunicator(library, buffer, SMALL, RankProgress())
        for kind in (*shared, *not_shared):
            mine = kind * (library.info.rank + 2)
            found, expected = communicator.all_gather(mine), library.all_gather(mine)
            assert found.dtype == kind.dtype and torch.equal(found, expected), kind
        shifted = torch.arange(3.0)[1:]
        assert communicator.all_gather(shifted).tolist() == [1.0, 2.0] * 2
        assert buffer.calls == [("all_gather", kind.nbytes) for kind in shared]
        part = torch.arange(10.0).view(2, 5) + library.info.rank
        assert torch.equal(communicator.tree_reduce(part, torch.bfloat16), library.tree_reduce(part, torch.bfloat16))
        assert buffer.calls[-1] == ("all_gather", part.nbytes)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("reduced", "gathered", "reason"),
    [
        ({16, 64, 128}, {8, 96}, None),
        ({16, 144}, {8}, "all-reduces of 144 bytes; it takes multiples of 16 up to 128"),
        ({8, 16}, {8}, "all-reduces of 8 bytes"),
        ({16}, {8, 104}, "all-gathers of 104 bytes; it takes multiples of 8 up to 96"),
        ({16}, {12}, "all-gathers of 12 bytes"),
    ],
)
def test_recordings_need_a_library_that_can_or_all_in_shared_memory(
    reduced: set[int], gathered: set[int], reason: str | None
) -> None:
    """Oracle: the plan's sizes, by hand; a library that can be captured takes what does not fit."""
    sizes = RecordedSizes(all_reduces=frozenset(reduced), all_gathers=frozenset(gathered))

    def body(staged: Communicator) -> str | None:
        communicator = SymmetricCommunicator(staged, FakeBuffer(staged), SMALL, RankProgress())
        assert not communicator.can_capture
        return communicator.why_not_capture(sizes)

    found = run_ranks(2, body)
    assert found[0] == found[1]
    assert found[0] is None if reason is None else reason in str(found[0])
    nccl = SingleRank()
    communicator = SymmetricCommunicator(nccl, FakeBuffer(nccl), SMALL, RankProgress())
    assert communicator.can_capture and communicator.why_not_capture(sizes) is None


def test_a_gpu_that_does_not_answer_ends_the_job() -> None:
    """Oracle: after the time limit the error says which part is late, and the remedy; it is told to the job, because
    the main thread may be unable to, and no rank goes on with the library."""
    groups = alone(RankProgress())
    told: list[BaseException] = []
    groups.report = told.append

    def wait() -> None:
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            groups.check()
            time.sleep(0.01)

    def body(library: Communicator) -> None:
        set_up(
            library,
            lambda _: FakeMemory(FakeBuffer(library)),
            wait=wait,
            within=lambda what: groups.time_limit(what, "use NCCL", 0.05),
        )

    with pytest.raises(RankError, match=r"copying between GPUs has not ended within 0.05 s: use NCCL"):
        run_ranks(2, body)
    assert told and "use NCCL" in str(told[0])


def set_up(
    library: Communicator,
    allocate: Any,
    *,
    is_required: bool = False,
    wait: Any = lambda: None,
    within: Any = nullcontext,
) -> Communicator:
    """The setup of ``all_reduce.set_up``, for tensors of up to 4 KiB."""
    return with_symmetric_memory(
        library,
        dataclasses.replace(H200, world_size=library.info.world_size),
        allocate,
        HostOf(library),
        RankProgress(),
        device=torch.device("cpu"),
        largest_bytes=4 * KIB,
        is_required=is_required,
        wait=wait,
        within=within,
    )


def test_ranks_that_can_share_memory_do() -> None:
    """Oracle: multicast only if every rank has it; the buffer holds the largest part of an all-gather."""

    def body(library: Communicator) -> ReducePlan:
        made: list[int] = []

        def allocate(num_bytes: int) -> FakeMemory:
            made.append(num_bytes)
            return FakeMemory(FakeBuffer(library, has_multicast=library.info.rank != 2))

        communicator = set_up(library, allocate)
        assert isinstance(communicator, SymmetricCommunicator) and made == [4 * MIB]
        return communicator.plan

    plans = run_ranks(4, body)
    assert plans == [plans[0]] * 4 and plans[0].multimem_bytes == 0 and plans[0].one_shot_bytes == 4 * KIB


def test_marks_are_read_when_all_have_written() -> None:
    """Oracle: the ranks' own order: rank 1 writes late, when rank 0 could have read long ago; both share memory."""

    def body(library: Communicator) -> None:
        is_late = library.info.rank == 1

        class Late(FakeBuffer):
            def of(self, rank: int) -> torch.Tensor:
                nonlocal is_late
                if is_late:
                    time.sleep(0.2)
                is_late = False
                return super().of(rank)

        assert isinstance(set_up(library, lambda _: FakeMemory(Late(library))), SymmetricCommunicator)

    run_ranks(2, body)


@pytest.mark.parametrize("can_capture", [False, True])
def test_all_gathers_stay_the_library_s_where_graphs_can_contain_them(can_capture: bool) -> None:
    """Oracle: the rule; what both gather is equal."""

    def body(library: Communicator) -> None:
        library.can_capture, mine = can_capture, torch.tensor([1, 2]) + library.info.rank
        buffer = FakeBuffer(library)
        communicator = set_up(library, lambda _: FakeMemory(buffer))
        assert isinstance(communicator, SymmetricCommunicator)
        buffer.calls.clear()
        assert communicator.plan.gathers(mine.nbytes) is not can_capture
        assert communicator.all_gather(mine).tolist() == [1, 2, 2, 3]
        assert bool(buffer.calls) is not can_capture

    run_ranks(2, body)


@pytest.mark.parametrize(
    "fault", ["allocates nothing", "maps nothing", "loses writes", "adds wrongly", "gathers wrongly", "reads late"]
)
def test_one_rank_that_can_not_share_memory_decides_for_all(fault: str) -> None:
    """Oracle: all ranks keep the library, or, if symmetric memory is required, all fail and name a rank that saw it.

    No rank maps the others' memory, which could take long, before all ranks have theirs.
    """

    def body(library: Communicator) -> None:
        is_faulty, made = library.info.rank == 1, []

        def allocate(num_bytes: int) -> FakeMemory:
            if is_faulty and fault == "allocates nothing":
                raise RuntimeError("no fabric")
            error = float(is_faulty and fault == "adds wrongly")
            made.append(
                FakeMemory(
                    FakeBuffer(
                        library,
                        error=error,
                        shift=int(is_faulty and fault == "gathers wrongly"),
                        loses_writes=is_faulty and fault == "loses writes",
                        reads_late=is_faulty and fault == "reads late",
                    ),
                    fault="no handle" if is_faulty and fault == "maps nothing" else "",
                )
            )
            return made[-1]

        assert set_up(library, allocate) is library
        with pytest.raises(
            RankError, match=r"rank [01]: .*(no fabric|no handle|did not arrive|another result); use auto"
        ):
            set_up(library, allocate, is_required=True)
        assert all(memory.was_shared == (fault != "allocates nothing") for memory in made)

    run_ranks(2, body)
