"""The device memory of a batch's rows, which the ledger sets aside.  Oracle: the shapes, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_engine.job.topology import RankInfo
from tp_engine.kernels.sampling import tables as sampling_tables
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.worker import runner_maker

CPU = torch.device("cpu")
ROWS, MAX_LEN, BLOCK_SIZE, VOCAB = 6, 100, 16, 203
INPUTS = ROWS * (4 + 4 + 8 + 8 + 4 + 4 * 7) + 4 * (ROWS + 1)  # of decodes, a block table among them
ALIKE = [KvKind(window=None, num_kv_heads=1, head_dim=8)] * 3


def config(num_spare_rows: int = 0, kinds: Sequence[KvKind] = ALIKE) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=ROWS, block_size=BLOCK_SIZE, scores_processed=False),
        max_model_len=MAX_LEN,
        model=SimpleNamespace(vocab_size=VOCAB, turns_by_place=False),
        num_spare_rows=num_spare_rows,
        kv_layout=lay_out(kinds),
    )


def counted(device_type: str, world_size: int = 1, kinds: Sequence[KvKind] = ALIKE, num_spare_rows: int = 0) -> int:
    """The bytes of a rank's tables."""
    info = RankInfo(rank=0, world_size=world_size, local_world_size=world_size)
    return runner_maker.table_bytes(config(num_spare_rows, kinds), info, device_type)


@pytest.mark.parametrize(("world_size", "width"), [(1, 203), (2, 112)])
def test_on_a_cpu(world_size: int, width: int) -> None:
    """Oracle: by hand: token ids, block table, computed tokens; counts and flags of penalties for the rank's part of
    the vocabulary; the inputs of decodes."""
    rows = 4 * (MAX_LEN + 1) + 4 * 7 + 4
    assert counted("cpu", world_size) == ROWS * (rows + 5 * width) + INPUTS


def test_draft_rows_are_rows_but_no_inputs_of_their_own() -> None:
    """Oracle: by hand: as above, two rows more."""
    rows = 4 * (MAX_LEN + 1) + 4 * 7 + 4
    assert counted("cpu", num_spare_rows=2) == (ROWS + 2) * (rows + 5 * VOCAB) + INPUTS


def test_of_three_groups() -> None:
    """Oracle: by hand: two more block tables, and slots in the inputs of decodes, of 8 rows, a multiple of 4."""
    kinds = [dataclasses.replace(ALIKE[0], window=window) for window in (None, 9, 9)]
    inputs = 8 * (4 + 4 + 8 + 4 + 3 * (8 + 4 * 7)) + 4 * 9
    assert counted("cpu", 1, kinds) - counted("cpu") == ROWS * 2 * 4 * 7 + inputs - INPUTS


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: in addition the parameters for the sampling kernels, and a counter for each place of a step."""
    monkeypatch.setattr(runner_maker, "has_triton", lambda: True)
    tables = ROWS * (4 * (MAX_LEN + 1) + 4 * 7 + 4 + 5 * VOCAB)
    sampling = ROWS * (4 * sampling_tables.NUM_FLOATS + 4 + 8) + 4 * (ROWS + 512)
    assert counted("cuda") == tables + INPUTS + sampling


def test_nothing_is_allocated_for_the_answer() -> None:
    """Oracle: the tensors of the runner's own tables have as many bytes as counted."""
    batch = runner_maker.make_batch(config(), CPU)
    sampling = runner_maker.make_sampling(config(), RankInfo(), CPU)
    assert batch.num_bytes + sampling.num_bytes == counted("cpu")
    assert sampling.penalties.tables is None
