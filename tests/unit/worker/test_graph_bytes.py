"""How much memory recordings will take, from some of them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.unit.worker.memory_cases import FakeDevice
from tp_engine.system.units import MIB
from tp_engine.worker.batch.padded_batch import StepSizes
from tp_engine.worker.graphs.graph_plan import capture_sizes, measure_graph_bytes
from tp_engine.worker.graphs.step_runner import GraphPlan, StepRunner

PORTION = 20 * MIB


class Recordings:
    """Recordings that take ``own`` bytes each, and ``once`` more with the second one, in the allocator's portions."""

    def __init__(self, device: FakeDevice, first: int, own: int, once: int = 0) -> None:
        self.device, self.first, self.own, self.once = device, first, own, once
        self.num_made = self.needed = 0

    def capture_decodes(self, sizes: Any, recorder: Any, part: list[Any], behind: Any = None) -> None:
        for _ in part:
            self.needed += self.own if self.num_made else self.first
            self.needed += self.once if self.num_made == 1 else 0
            self.num_made += 1
        self.device.cached = -(-self.needed // PORTION) * PORTION

    def capture_prompts(self, sizes: Any, recorder: Any, part: list[Any]) -> None:
        self.capture_decodes(sizes, recorder, part)

    def forget(self) -> None:
        self.device.cached = 0


def measured(recordings: Recordings, plan: GraphPlan, drafting: int = 0) -> int:
    return measure_graph_bytes(plan, recordings.device, cast(StepRunner, recordings), drafting)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 256, 512])
@pytest.mark.parametrize(("own", "once"), [(MIB // 4, 0), (3 * MIB, 0), (MIB, 60 * MIB), (40 * MIB, 0)])
def test_an_estimate_is_near_what_all_take(most: int, own: int, once: int) -> None:
    """Oracle: what all recordings take together; off by at most a few of the allocator's portions and what the second
    one brings once, where two samples were off by fifty portions."""
    sizes = capture_sizes(None, most)
    plan = GraphPlan(sizes=sizes, make_recorder=lambda: cast(Any, None))
    found = measured(Recordings(FakeDevice(), 300 * MIB, own, once), plan)
    every = Recordings(FakeDevice(), 300 * MIB, own, once)
    every.capture_decodes(sizes, None, [*sizes])
    share = max(len(sizes) - 1, 6) / 6
    assert -PORTION <= found - every.device.cached <= share * (PORTION + once)


def test_every_kind_of_step_counts() -> None:
    """Oracle: decodes, prompts and the largest size with drafts, by hand; nothing stays recorded."""
    device = FakeDevice()
    plan = GraphPlan(
        sizes=(1, 2, 4), prompts=StepSizes(decodes=(0, 4), tokens=(64,)), make_recorder=lambda: cast(Any, None)
    )
    recordings = Recordings(device, PORTION, PORTION)
    assert measured(recordings, plan, drafting=2) == 5 * PORTION
    assert recordings.num_made == 5 and device.cached == 0
