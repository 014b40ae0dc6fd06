"""A rank's start, in this process: what it makes runs plans, and what fails leaves nothing open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_checkpoint
from tp_engine.config import EngineConfig
from tp_engine.distributed.groups import alone
from tp_engine.errors import MemoryBudgetError
from tp_engine.features.tiers.disk_writer import TiersOfEngine
from tp_engine.features.tiers.ranks import TiersOfRank
from tp_engine.ipc.job_board import JobBoard
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.plan import StepPlan
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.features import RankFeature
from tp_engine.worker.start import start_rank
from tp_engine.worker.trial_steps import GREEDY, trial_plan
from tp_engine.worker.worker import StartedRank, Worker

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@contextmanager
def started(folder: Path, board: JobBoard | None = None, **options: Any) -> Iterator[StartedRank]:
    """A world of one, with nothing open afterwards."""
    effective = resolve(EngineConfig(model=str(folder), **OPTIONS | options))
    before = torch.get_num_threads()
    channels = {} if board is None else board.slots[0].tier_progress()
    with ExitStack() as closing:
        yield start_rank(effective, alone(RankProgress()), channels, closing, owns_process=False)
    assert torch.get_num_threads() == before


def test_the_record_is_all_that_a_worker_needs(folder: Path) -> None:
    """Oracle: a step whose tokens are ids of the vocabulary, and the ledger's line by hand; after ``close`` there is no
    runner, and no report fails."""
    with started(folder, num_gpu_blocks_override=4) as rank:
        worker = Worker(rank)
        plan: StepPlan = trial_plan(rank.effective.config, rank.runner.num_groups, [GREEDY] * 2)
        result = worker.execute(plan).result()
        assert len(result.token_ids) == 2 and 0 <= result.token_ids.min() <= result.token_ids.max() < 128
        assert rank.groups.progress.phase == RankPhase.SAMPLE
        assert rank.memory["kv_cache"] == 4 * rank.effective.kv_shape.block_bytes
        assert "recording steps" in rank.seconds and worker.memory_growth_bytes() >= 0
        worker.close()
        assert worker.report() == {} and worker.expert_token_counts() == []


def test_features_see_a_whole_rank(folder: Path) -> None:
    """Oracle: the order of the drawing: a feature is asked when all that it is given has been made."""
    with started(folder, num_gpu_blocks_override=4, kv_offloading_size=0.001) as rank:
        own = rank.features["tiers"]
        assert isinstance(own, TiersOfRank) and own.num_slots > 0
        assert rank.memory["kv_host"] == own.host_bytes
        assert all(isinstance(feature, RankFeature) for feature in rank.features.values())


def test_a_journal_has_the_groups_of_all_ranks(tmp_path: Path) -> None:
    """Oracle: ``KvLayout``: the model has 6 groups of layers on one rank, and 3 on two, whose layers are equally wide;
    the pool's blocks, and so the journal's places, are of 3."""
    model, board = make_checkpoint(tmp_path / "model", "gemma4", num_kv_heads=2), JobBoard.create(1)
    tiers: dict[str, Any] = {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": 0.01}
    with started(model, board, num_gpu_blocks_override=64, **tiers) as rank:
        config = replace(rank.effective.config, tensor_parallel_size=2)
        own = TiersOfEngine()
        own.start(replace(rank, effective=replace(rank.effective, config=config)), board)
        assert own.given.contents is not None
        assert (len(rank.effective.kv_layout.groups), own.given.contents.header.num_groups) == (6, 3)
        own.close()


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory_bytes": 1}, {"num_gpu_blocks_override": 4, "kv_offloading_size": 1e-9}]
)
def test_a_start_that_fails_leaves_nothing_open(folder: Path, options: dict[str, Any]) -> None:
    """Oracle: the number of threads that PyTorch had before; the first fails in the number of blocks, the second in a
    feature's sizes."""
    with pytest.raises(MemoryBudgetError), started(folder, **options):
        raise AssertionError("it has started")
