"""Collectives through shared GPU memory, compared with NCCL.  Every rank runs every test; needs a GPU per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tp_engine.apps.check.collectives import random_part
from tp_engine.config import EngineConfig
from tp_engine.distributed import groups as process_groups
from tp_engine.distributed.all_reduce import ReduceDevice, set_up
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.fused_norm import FUSED_NORMS, FusedSizes
from tp_engine.distributed.reduce_plan import why_not
from tp_engine.distributed.store import launched_store
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator, probe_machine
from tp_engine.job.progress import RankProgress
from tp_engine.kernels.layer_ops import NormRule, add_norm
from tp_engine.kernels.ops import op
from tp_engine.system import env

LAUNCHED = env.launched_rank() or pytest.fail("run this through scripts/test_multi_gpu")
WORLD_SIZE = LAUNCHED.world_size
LARGEST_BYTES = 48 << 20

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < WORLD_SIZE, reason="needs a GPU for each rank")


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[SymmetricCommunicator, Communicator]]:
    """The communicator under test and NCCL's, in one job."""
    torch.cuda.set_device(LAUNCHED.local_rank)
    machine = probe_machine(range(WORLD_SIZE))
    if obstacle := why_not(machine, "bfloat16"):
        pytest.skip(obstacle)
    store = launched_store(timeout_s=60)
    groups = process_groups.join(
        LAUNCHED, store, RankProgress(), lambda: None, device_type="cuda", start_s=60, collective_s=60
    )
    nccl = groups.communicator
    device = torch.device("cuda", LAUNCHED.local_rank)
    config = EngineConfig(
        device="cuda", dtype="bfloat16", all_reduce_backend="symm_mem", tensor_parallel_size=WORLD_SIZE
    )
    on_device = ReduceDevice(torch_device=device, largest_bytes=LARGEST_BYTES, wait=torch.cuda.synchronize)
    set_up(config, groups, lambda _, phase: phase(), on_device, num_hosts=1)
    assert isinstance(groups.communicator, SymmetricCommunicator)
    yield groups.communicator, nccl
    torch.cuda.synchronize()
    groups.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_bytes", [16, 4096, 256 << 10, 1 << 20, 6 << 20, 24 << 20, 48 << 20])
def test_sums_are_as_good_as_nccl_s(
    both: tuple[SymmetricCommunicator, Communicator], num_bytes: int, dtype: torch.dtype
) -> None:
    """Oracle: the sum in float64; the error is at most twice NCCL's or one rounding, and repeats bit for bit."""
    symmetric, nccl = both
    parts = [random_part(rank, num_bytes // dtype.itemsize, dtype).cuda() for rank in range(WORLD_SIZE)]
    exact = torch.stack(parts).double().sum(0)
    theirs, *ours = (one.all_reduce(parts[LAUNCHED.rank].clone()) for one in (nccl, symmetric, symmetric))
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    error, allowed = (ours[0] - exact).abs().max(), 2 * (theirs - exact).abs().max() + rounding
    assert error <= allowed
    assert torch.equal(*ours)


@pytest.mark.parametrize("num_words", [1, 65, 4096, 100_001, (1 << 21) // WORLD_SIZE])
def test_all_gathers_are_nccl_s(both: tuple[SymmetricCommunicator, Communicator], num_words: int) -> None:
    """Oracle: NCCL, for parts up to the largest; twice outside of a graph, then in one, with new values.

    Beside NCCL the engine leaves all-gathers to it, so the plan here is a test's own.
    """
    pytest.importorskip("triton")
    made, nccl = both
    assert not made.plan.gathers(8), "NCCL's can be in a graph"
    plan = replace(made.plan, gather_bytes=made.plan.buffer_bytes)
    symmetric = SymmetricCommunicator(nccl, made.buffer, plan, RankProgress())
    assert symmetric.plan.gathers(8 * num_words)
    mine = torch.arange(num_words, device="cuda") + (LAUNCHED.rank << 40)
    for _ in range(2):
        assert torch.equal(symmetric.all_gather(mine), nccl.all_gather(mine))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = symmetric.all_gather(mine)
    for _ in range(2):
        mine += 1
        graph.replay()
        assert torch.equal(output, nccl.all_gather(mine))


def test_a_graph_holds_them(both: tuple[SymmetricCommunicator, Communicator]) -> None:
    """Oracle: the same call outside of the graph, with new values in the recorded tensor."""
    symmetric, _ = both
    tensor = random_part(LAUNCHED.rank, 4096, torch.bfloat16).cuda()
    symmetric.all_reduce(tensor.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = symmetric.all_reduce(tensor.clone())
    for seed in (WORLD_SIZE, 2 * WORLD_SIZE):
        tensor.copy_(random_part(LAUNCHED.rank + seed, 4096, torch.bfloat16))
        expected = symmetric.all_reduce(tensor.clone())
        graph.replay()
        assert torch.equal(output, expected)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_norm_behind_an_all_reduce(both: tuple[SymmetricCommunicator, Communicator], num_rows: int) -> None:
    """Oracle: the proof that a start makes: float64, within twice the error of all-reduce and norm, and equal bits."""
    symmetric, _ = both
    sizes = FusedSizes(
        rank=LAUNCHED.rank, world_size=WORLD_SIZE, group=None, max_rows=num_rows, size=4096, dtype=torch.bfloat16
    )
    rule = NormRule(random_part(99, 4096, torch.bfloat16).cuda(), 1e-6)
    parts = [
        random_part(rank, num_rows * 4096, torch.bfloat16).cuda().view(num_rows, 4096) for rank in range(WORLD_SIZE)
    ]
    exact = add_norm(torch.stack(parts).double().sum(0), stream := torch.zeros_like(parts[0]).double(), rule)
    plain = op("add_norm", "cuda")(symmetric.all_reduce(parts[LAUNCHED.rank].clone()), torch.zeros_like(parts[0]), rule)
    fused = FUSED_NORMS["triton"].make(sizes, symmetric.buffer)
    found = [fused(parts[LAUNCHED.rank], torch.zeros_like(parts[0]), rule, 1.0, 1.0) for _ in range(2)]
    assert torch.equal(*found) and stream.any()
    assert (found[0] - exact).square().mean().sqrt() <= 2 * (plain - exact).square().mean().sqrt()
