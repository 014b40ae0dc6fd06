"""The first collective between GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.simulated_ranks import run_ranks
from tp_engine.distributed import first_collective
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.distributed.first_collective import remedy_for, try_first_collective
from tp_engine.distributed.groups import RankGroups, alone
from tp_engine.errors import RankError
from tp_engine.job.progress import RankProgress
from tp_engine.system import env

CPU = torch.device("cpu")


def groups_of(communicator: Communicator) -> RankGroups:
    groups = alone(RankProgress())
    groups.info, groups.communicator = communicator.info, communicator
    return groups


def test_a_right_sum_is_silent() -> None:
    """Oracle: three ranks that can add."""
    run_ranks(3, lambda library: try_first_collective(groups_of(library), CPU, lambda: None))


class Broken(SingleRank):
    """Ranks whose sum is what ``result`` says."""

    def __init__(self, like: Communicator, result: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.info, self._result = like.info, result

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._result(tensor)


def raised(text: str) -> torch.Tensor:
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda tensor: tensor, r"gave 1, and 2 ranks added 1 each: .* NCCL_P2P_DISABLE=1"),
        (
            lambda tensor: raised("NCCL: Cuda failure 401\nNVLS"),
            r"failed: NCCL: .* NCCL_NVLS_ENABLE=0; .*fabric",
        ),
    ],
)
def test_a_fault_names_the_remedy(result: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """Oracle: the sum of two ones, and the words of public reports."""

    def body(library: Communicator) -> None:
        with pytest.raises(RankError, match=rf"rank {library.info.rank}: NCCL .*{message}"):
            try_first_collective(groups_of(Broken(library, result)), CPU, lambda: None)

    run_ranks(2, body)


def test_a_sum_that_never_ends_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the limit; the job hears of it from another thread, and who waits raises the same."""
    monkeypatch.setattr(first_collective, "_DEADLINE_S", 0.05)
    groups = alone(RankProgress())
    told: list[BaseException] = []
    groups.report = told.append

    def wait() -> None:
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            groups.check()
            time.sleep(0.01)

    message = r"the first all-reduce between GPUs has not ended within 0.05 s: .*IOMMU or ACS.* NCCL_P2P_DISABLE=1"
    with pytest.raises(RankError, match=message):
        try_first_collective(groups, CPU, wait)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("ncclUnhandledCudaError: Failed to bind NVLink SHARP (NVLS) Multicast memory", "NCCL_NVLS_ENABLE=0"),
        ("transport/p2p.cc: peer access is not supported between these two devices", "NCCL_P2P_DISABLE=1"),
        ("Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888)", "--shm-size"),
        ("Net/Socket: connection refused", "NCCL_SOCKET_IFNAME"),
        ("ncclInvalidUsage", "NCCL_DEBUG=INFO"),
    ],
)
def test_an_error_of_nccl_has_its_remedy(text: str, remedy: str) -> None:
    """Oracle: errors of public reports, and the variable that helped there."""
    assert remedy in remedy_for(text)


@pytest.mark.parametrize(
    ("name", "value", "is_kept_out"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("NCCL_GRAPH_REGISTER", "1", False),
    ],
)
def test_recorded_buffers_stay_unregistered_with_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_kept_out: bool
) -> None:
    """Oracle: the allocator's setting; what the user has set stays."""
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    if name == "NCCL_GRAPH_REGISTER":
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    said = env.graphs_stay_unregistered()
    assert (said is not None) == is_kept_out
    if is_kept_out:
        assert env.copied()["NCCL_GRAPH_REGISTER"] == "0"
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
