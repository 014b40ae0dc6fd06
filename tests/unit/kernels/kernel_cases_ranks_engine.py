"""Ranks on the GPU's data path, interpreted, whose collectives go through memory that they share, as on one GPU.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: one rank on plain PyTorch, its tokens; and in a recorded
step no collective is the library's, which could not be captured.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.ranks.launch import torchrun
from tests.unit.kernels.kernel_cases_engine import RECORDED, generate, gpu_path, make_model
from tests.unit.kernels.kernel_cases_gather import addresses
from tests.unit.kernels.kernel_harness import AGREEMENT, triton_ops_on_cpus
from tp_engine.distributed.collectives import ProcessGroupCommunicator
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.reduce_plan import ReducePlan
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator
from tp_engine.kernels.distributed.gather_triton import MAX_PROGRAMS, all_gather_triton
from tp_engine.plan import StepPlan
from tp_engine.units import KIB
from tp_engine.worker.graphs.captured_steps import CapturedSteps
from tp_engine.worker.graphs.graph_plan import why_not_capture
from tp_engine.worker.graphs.step_runner import GraphPlan

BUFFER_BYTES = 64 * KIB
PLAN = ReducePlan(one_shot_bytes=BUFFER_BYTES, gather_bytes=BUFFER_BYTES)


class FileBuffer:
    """Buffers and signals of all ranks in files of ``folder``; sums are taken of what the kernel gathers."""

    has_multicast = False

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        def mapped(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
            whole = torch.from_file(str(folder / name), shared=True, size=world_size * size, dtype=dtype)
            return whole.view(world_size, size)

        self._rank = rank
        self._buffers = mapped("buffers", BUFFER_BYTES // torch.int64.itemsize, torch.int64)
        self._signals = mapped("signals", 2 * MAX_PROGRAMS * world_size, torch.int32)
        self.addresses, self.signals = addresses([*self._buffers]), addresses([*self._signals])

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return all_gather_triton(part, buffers=self.addresses, signals=self.signals, rank=self._rank)

    def one_shot(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather(tensor.view(torch.int64)).view(tensor.dtype).sum(0))

    two_shot = multimem = one_shot

    def of(self, rank: int) -> torch.Tensor:
        return self._buffers[rank].view(torch.uint8)


def run_rank(world_size: int, folder: Path) -> None:
    """What each rank of the job runs; rank 0 writes the tokens, and the rows of its recorded steps."""
    begun: list[int] = []
    ended: list[int] = []
    replay, library = CapturedSteps.run, ProcessGroupCommunicator

    def share_memory(config: object, groups: RankGroups, *_: object, **__: object) -> None:
        buffer = FileBuffer(folder, groups.info.rank, world_size)
        groups.communicator = SymmetricCommunicator(groups.communicator, buffer, PLAN, groups.progress)

    def graph_plan(config: object, backend: object, communicator: Any, model: Any, *_: object) -> GraphPlan:
        assert not communicator.can_capture
        assert why_not_capture(communicator, model, RECORDED.sizes, tp_invariant=False) is None
        return RECORDED

    def note_and_replay(steps: CapturedSteps[Any], plan: StepPlan, *arguments: Any) -> Any:
        begun.append(len(plan.decode_rows))
        found = replay(steps, plan, *arguments)
        ended.append(len(plan.decode_rows))
        return found

    def outside(collective: Any) -> Any:
        def run(self: Any, tensor: torch.Tensor) -> Any:
            assert len(begun) == len(ended), "a recorded step calls the library"
            return collective(self, tensor)

        return run

    with (
        triton_ops_on_cpus(),
        gpu_path(),
        patch("tp_engine.worker.worker.share_memory", share_memory),
        patch("tp_engine.worker.worker.graph_plan", graph_plan),
        patch.object(CapturedSteps, "run", note_and_replay),
        patch.object(library, "all_reduce", outside(library.all_reduce)),
        patch.object(library, "all_gather", outside(library.all_gather)),
        patch.object(library, "gather", outside(library.gather)),
    ):
        tokens = generate(folder / "model", tensor_parallel_size=world_size)
    (folder / "tokens").write_text(json.dumps([tokens, ended]))


def main(num_ranks: str, folder: str | None = None) -> None:
    world_size = int(num_ranks)
    if folder is not None:
        run_rank(world_size, Path(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        expected = generate(make_model(name))
        (Path(name) / "buffers").write_bytes(bytes(world_size * BUFFER_BYTES))
        (Path(name) / "signals").write_bytes(bytes(world_size * 2 * MAX_PROGRAMS * world_size * torch.int32.itemsize))
        module = ("-m", "tests.unit.kernels.kernel_interpreter", "kernel_cases_ranks_engine")
        job = torchrun(world_size, [*module, num_ranks, name], timeout_s=240)
        assert job.returncode == 0, job.stdout[-6000:]
        tokens, recorded = json.loads((Path(name) / "tokens").read_text())
    assert tokens == expected, (tokens, expected)
    assert {1, 2} <= set(recorded) and len(recorded) > 5, recorded
    print(AGREEMENT)
