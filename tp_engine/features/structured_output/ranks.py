"""The masks of a step, on each rank."""

from collections.abc import Iterator

from tp_engine.features.structured_output.feature import MASK_ROWS, MASKS
from tp_engine.plan import StepPlan
from tp_engine.sampling.processors import GrammarBitmasks
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.features import RunnerParts


class StepMasks(RunnerFeature):
    """Hands each plan's masks to the sampler; those of the plan before are forgotten."""

    def __init__(self, masks: GrammarBitmasks) -> None:
        self._masks = masks

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)

    def apply(self, plan: StepPlan) -> None:
        if MASK_ROWS.name in plan.extensions or len(self._masks.rows):
            self._masks.set(MASK_ROWS.of(plan), MASKS.of(plan))


def make(parts: RunnerParts) -> Iterator[StepMasks]:
    """Make a runner's half."""
    yield StepMasks(parts.sampling.masks)
