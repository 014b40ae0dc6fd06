"""Collectives through host memory."""

from __future__ import annotations

import torch

from tests.simulated_ranks import run_ranks
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.groups import StagedCommunicator


def test_every_collective_gives_what_the_host_gives() -> None:
    """Oracle: the same collectives without host memory, on three simulated ranks."""

    def body(host: Communicator) -> None:
        staged = StagedCommunicator(host)
        assert staged.info is host.info and not staged.can_capture
        mine = torch.arange(6.0).view(2, 3) * (host.info.rank + 1)
        for name in ("all_reduce", "all_gather", "gather"):
            expected, found = (getattr(through, name)(mine.clone()) for through in (host, staged))
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found, expected)
        tensor = mine.clone()
        assert staged.all_reduce(tensor) is tensor and torch.equal(tensor, torch.arange(6.0).view(2, 3) * 6)

    run_ranks(3, body)
