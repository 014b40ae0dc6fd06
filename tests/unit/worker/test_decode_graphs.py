"""Recorded decode steps: which sizes exist, and which size a batch uses.  Oracle: the rules in the docstrings."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.errors import ConfigError, RankError
from tp_engine.plan import StepPlan
from tp_engine.worker.graphs import recorder
from tp_engine.worker.graphs.captured_steps import DecodeShape
from tp_engine.worker.graphs.graph_plan import capture_sizes
from tp_engine.worker.graphs.recorder import CudaRecorder
from tp_engine.worker.results.readback import Readback


@pytest.mark.parametrize(
    ("max_num_seqs", "first", "last", "count"),
    [(1, 1, 1, 1), (3, 1, 3, 3), (8, 1, 8, 4), (20, 1, 20, 6), (256, 1, 256, 35), (1024, 1, 512, 51)],
)
def test_default_sizes(max_num_seqs: int, first: int, last: int, count: int) -> None:
    """Oracle: the sizes begin at 1, end at ``max_num_seqs`` or 512, rise, and pad a batch by at most 16 rows."""
    sizes = capture_sizes(None, max_num_seqs)
    assert (sizes[0], sizes[-1], len(sizes)) == (first, last, count)
    assert list(sizes) == sorted(set(sizes))
    assert all(larger - smaller <= 16 for smaller, larger in itertools.pairwise(sizes))


def test_asked_sizes_are_sorted_and_distinct() -> None:
    """Oracle: the set of the given numbers."""
    assert capture_sizes("8, 1,4,8", 16) == (1, 4, 8)


@pytest.mark.parametrize("asked", ["", "a", "1,,2", "1.5"])
def test_what_is_no_list_is_refused(asked: str) -> None:
    """Oracle: the error has the value and an example."""
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes is .* such as 1,2,4,8"):
        capture_sizes(asked, 16)


@pytest.mark.parametrize(("asked", "wrong"), [("0,1", "0"), ("1,17", "17"), ("-3", "-3")])
def test_sizes_out_of_range_are_refused(asked: str, wrong: str) -> None:
    """Oracle: the error has the size, the rule and the remedy."""
    with pytest.raises(ConfigError, match=rf"contains {wrong}; sizes go from 1 to max_num_seqs, which is 16"):
        capture_sizes(asked, 16)


@pytest.mark.parametrize(
    ("num_rows", "num_prompts", "size"),
    [(1, 0, 1), (2, 0, 2), (3, 0, 4), (5, 0, 8), (8, 0, 8), (9, 0, None), (1, 1, None)],
)
def test_a_batch_runs_in_the_smallest_recording_that_holds_it(
    num_rows: int, num_prompts: int, size: int | None
) -> None:
    """Oracle: the rule, by hand; what is larger, and what has prompts, is launched."""
    rows = np.arange(num_rows + num_prompts, dtype=np.int32)
    plan = StepPlan(step_id=1, decode_rows=rows[:num_rows], prefill_rows=rows[num_rows:])
    batch: Any = SimpleNamespace(tables=None)
    assert DecodeShape(batch, (1, 2, 4, 8)).size_for(plan) == size


def test_a_recording_that_waits_for_the_device_ends_if_another_rank_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the error of the check; the device never gets to the end of the step, and the driver is not asked."""

    class NeverReached:
        def query(self) -> bool:
            return False

    def fail() -> None:
        raise RankError(1, "has died")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(recorder, "record_event", NeverReached)
    steps: list[int] = []

    def step() -> torch.Tensor:
        steps.append(1)
        return torch.zeros(1)

    with pytest.raises(RankError, match="has died"):
        CudaRecorder(fail).record(step)
    assert steps == [1]


def test_readback_on_a_cpu_is_the_tensor_itself() -> None:
    """Oracle: the tensor's values; nothing is copied."""
    ids = torch.tensor([5, 6], dtype=torch.int32)
    wait = Readback(8, torch.device("cpu")).start(ids)
    ids[0] = 9
    assert wait().tolist() == [9, 6]


def test_readback_on_a_cpu_follows_the_tensor_that_it_is_given() -> None:
    """Oracle: the tensors' values, both for a tensor that returns, as from a recorded step, and for another one."""
    readback, recorded = Readback(8, torch.device("cpu")), torch.tensor([5], dtype=torch.int32)
    assert [readback.start(recorded)().tolist() for _ in range(2)] == [[5], [5]]
    recorded[0] = 7
    assert readback.start(recorded)().tolist() == [7]
    assert readback.start(torch.tensor([3, 4], dtype=torch.int32))().tolist() == [3, 4]
    assert readback.start(recorded)().tolist() == [7]
