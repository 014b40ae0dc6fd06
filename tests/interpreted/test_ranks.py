"""Ranks on the GPU's data path, interpreted, whose collectives go through memory that they share, as on one GPU.

torchrun --nproc-per-node N -m tests.interpreted.test_ranks MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.interpreted.engines import MODEL, RECORDED, SAMPLING, generate, gpu_path
from tests.interpreted.interpreter import mend_interpreter
from tests.ranks.launch import torchrun
from tests.unit.kernels.kernel_cases_gather import addresses
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine.distributed.collectives import ProcessGroupCommunicator
from tp_engine.distributed.fused_norm import FusedSizes, TritonFusedNorm
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.reduce_plan import ReducePlan
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator
from tp_engine.kernels.distributed.gather_triton import MAX_PROGRAMS, all_gather_triton
from tp_engine.plan import StepPlan
from tp_engine.system.units import KIB
from tp_engine.worker.graphs.captured_steps import CapturedSteps
from tp_engine.worker.graphs.graph_plan import sizes_of
from tp_engine.worker.graphs.step_runner import GraphPlan

BUFFER_BYTES = 64 * KIB
# Llama's default among them: top_p without top_k.
NUCLEUS = (*SAMPLING[:1], {"temperature": 0.6, "top_p": 0.9, "seed": 3}, *SAMPLING[2:])
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


class CountedFusedNorm(TritonFusedNorm):
    """Counts its calls."""

    calls = 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        CountedFusedNorm.calls += 1
        return super().__call__(*arguments)


def run_rank(model: Path, folder: Path) -> None:
    """What each rank of the job runs; rank 0 writes the tokens, and the rows of its recorded steps."""
    world_size = int(os.environ["WORLD_SIZE"])
    begun: list[int] = []
    ended: list[int] = []
    replay, library = CapturedSteps.run, ProcessGroupCommunicator

    def share_memory(config: object, groups: RankGroups, *_: object, **__: object) -> None:
        buffer = FileBuffer(folder, groups.info.rank, world_size)
        made = groups.communicator = SymmetricCommunicator(groups.communicator, buffer, PLAN, groups.progress)
        rank, width = groups.info.rank, MODEL["hidden_size"]
        sizes = FusedSizes(rank=rank, world_size=world_size, group=None, max_rows=2, size=width, dtype=torch.float32)
        made.fused_norm, made.fused_bytes = CountedFusedNorm(sizes, buffer), 2 * width * torch.float32.itemsize

    def graph_plan(config: object, backend: object, communicator: Any, model: Any, *_: object) -> GraphPlan:
        assert not communicator.can_capture
        assert communicator.why_not_capture(sizes_of(model, RECORDED.sizes, tp_invariant=False)) is None
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
        gpu_path(graph_plan, warms_up=False),
        patch("tp_engine.distributed.all_reduce.set_up", share_memory),
        patch.object(CapturedSteps, "run", note_and_replay),
        patch.object(library, "all_reduce", outside(library.all_reduce)),
        patch.object(library, "all_gather", outside(library.all_gather)),
        patch.object(library, "gather", outside(library.gather)),
    ):
        tokens = generate(model, tensor_parallel_size=world_size, sampling=NUCLEUS)
    (folder / "tokens").write_text(json.dumps([tokens, ended, CountedFusedNorm.calls]))


@pytest.mark.slow
def test_ranks_in_shared_memory(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: one rank's tokens on plain PyTorch, greedy and sampled; recorded steps have no other collectives, and
    those of one and two rows have the norms behind their all-reduces in one kernel.  Two ranks;
    ``test_gather_of_processes`` has the collective on four, without an engine."""
    num_ranks = 2
    folder = checkpoint("qwen3", **MODEL)
    (tmp_path / "buffers").write_bytes(bytes(num_ranks * BUFFER_BYTES))
    (tmp_path / "signals").write_bytes(bytes(num_ranks * 2 * MAX_PROGRAMS * num_ranks * torch.int32.itemsize))
    job = torchrun(num_ranks, ["-m", "tests.interpreted.test_ranks", str(folder), str(tmp_path)])
    assert job.returncode == 0, job.stdout[-6000:]
    tokens, recorded, num_fused = json.loads((tmp_path / "tokens").read_text())
    assert tokens == generate(folder, sampling=NUCLEUS)
    assert {1, 2} <= set(recorded) and len(recorded) > 5 and num_fused > 5, (recorded, num_fused)


if __name__ == "__main__":
    mend_interpreter()
    run_rank(*map(Path, sys.argv[1:]))
