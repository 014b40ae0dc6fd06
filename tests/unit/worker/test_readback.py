"""Copies to the host that wait for their own step, and no longer than the other ranks live."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tp_engine.errors import RankError
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.worker.results import readback
from tp_engine.worker.results.pooled_rows import fetch_pooled
from tp_engine.worker.results.readback import Readback, wait_for


class FakeEvent:
    """Reached after ``num_looks`` looks; without a number never."""

    def __init__(self, num_looks: int | None) -> None:
        self.num_looks = num_looks

    def query(self) -> bool:
        if self.num_looks is not None:
            self.num_looks -= 1
        return self.num_looks is not None and self.num_looks < 0


def rank_has_died() -> None:
    raise RankError(1, "has died")


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """Readbacks of ``cuda`` with plain memory; the events that they record, each reached after 3 looks."""
    events: list[FakeEvent] = []

    def record_event() -> FakeEvent:
        events.append(FakeEvent(3))
        return events[-1]

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: plain(*sizes, **options))
    monkeypatch.setattr(readback, "record_event", record_event)
    return events


def test_a_wait_ends_when_the_device_is_there_or_a_rank_is_not() -> None:
    """Oracle: the event's looks, and the error of the check.  An event that comes soon costs no check."""
    event = FakeEvent(5)
    wait_for(event, rank_has_died)
    assert event.num_looks == -1
    with pytest.raises(RankError, match="rank 1: has died"):
        wait_for(FakeEvent(None), rank_has_died)


def test_ids_wait_for_their_event(pretended_cuda: list[FakeEvent]) -> None:
    """Oracle: the ids at the time of the copy, and looks at that copy's event alone; a dead rank ends the wait."""
    copies, ids = Readback(4, torch.device("cuda"), rank_has_died), torch.tensor([5, 6], dtype=torch.int32)
    first, second = copies.start(ids), copies.start(ids + 1)
    ids[0] = 9
    assert second().tolist() == [6, 7] and [event.num_looks for event in pretended_cuda] == [3, -1]
    assert first().tolist() == [5, 6]
    lost = copies.start(ids)
    pretended_cuda[-1].num_looks = None
    with pytest.raises(RankError, match="has died"):
        lost()


def test_other_results_are_copied_when_they_are_made(pretended_cuda: list[FakeEvent]) -> None:
    """Oracle: values at the time of the copy, although the tensors change before they are asked for.

    Log-probabilities and pooled states must not wait for what is launched behind them.
    """
    copies = Readback(4, torch.device("cuda"))
    scores = LogprobTensors(
        token_ids=torch.tensor([[3, 4]]), logprobs=torch.tensor([[-0.5, -1.0]]), ranks=torch.tensor([1])
    )
    states, logits = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 6.0]])
    found = scores.to_host(copies.fetch)
    pooled = fetch_pooled(copies.fetch, [7, 9], states, logits, [1])
    assert len(pretended_cuda) == 2
    for tensor in (scores.token_ids, scores.logprobs, scores.ranks, states, logits):
        tensor.zero_()
    host: Any = found()
    assert (host.token_ids.tolist(), host.logprobs.tolist(), host.ranks.tolist()) == ([[3, 4]], [[-0.5, -1.0]], [1])
    assert {row: values.tolist() for row, values in pooled().items()} == {7: [1.0, 2.0], 9: [5.0]}
