"""Looks for NaN in the model's outputs, and logs it once.

Such outputs still become tokens, mostly the first one of the vocabulary, so nothing else would show it.  What is looked
at costs nothing beside a prompt: what the output head reads in steps with prompts, the logits of the first such step,
and log-probabilities on their way to the host.  Other decodes may be recorded, so they are left alone; a request whose
prompt has such outputs has them in its decodes too.
"""

from collections.abc import Callable

import numpy as np
import torch

from tp_engine.layers.attention import Attention
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import TokenLogprobs
from tp_engine.system.log import get_logger
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.results.readback import PendingStep, record_event

logger = get_logger(__name__)

_CAUSES = (
    "Its tokens mean nothing.  The weights may hold NaN or infinity (a broken checkpoint), or values may overflow "
    "float16: try --dtype bfloat16 or float32, or other weights"
)


class OutputWatch(RunnerFeature):
    """One rank's watch; only the first rank reports what all ranks have."""

    def __init__(self, device: torch.device, *, is_first: bool = True) -> None:
        self._is_first = is_first
        self._target = (
            torch.zeros(2, dtype=torch.bool, pin_memory=True, device="cpu") if device.type == "cuda" else None
        )
        self._arriving: tuple[int, torch.Tensor, Callable[[], bool]] | None = None
        self._has_looked = self._has_said = False

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.on_logits.append(self.on_logits)
        hooks.on_sampled.append(self.on_sampled)
        hooks.take_model.append(self.take_model)

    def take_model(self, model: LanguageModel) -> list[Attention]:
        """Watch another model, and report on it afresh."""
        self._has_looked = self._has_said = False
        return []

    def on_logits(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.look(step.plan.step_id, hidden, logits)

    def on_sampled(self, step: PendingStep, inputs: StepInputs | None, token_ids: torch.Tensor | None) -> None:
        """Report what an earlier look has found, and look at log-probabilities when they arrive."""
        if self._arriving is not None:
            self.settle()
        wait = step.logprobs
        if wait is not None and not self._has_said:
            step.logprobs = lambda: self._looked_at(wait())

    def look(self, step_id: int, hidden: torch.Tensor, local_logits: torch.Tensor) -> None:
        """Begin to look at ``hidden`` (n, hidden), of all ranks, and this rank's ``local_logits`` (n, width)."""
        self.settle()
        if self._has_said or self._arriving is not None:
            return
        looks_at_logits = not self._has_looked and local_logits.shape[1] > 0
        self._has_looked = True
        found = torch.stack([one.isnan().any() for one in (hidden, local_logits)[: 1 + looks_at_logits]])
        if self._target is None:
            self._arriving = step_id, found, lambda: True
            self.settle()
        else:
            target = self._target[: len(found)]
            target.copy_(found, non_blocking=True)
            self._arriving = step_id, target, record_event().query

    def settle(self) -> None:
        """Report what an earlier look has found, once it has arrived."""
        if self._arriving is None or not self._arriving[2]():
            return
        step_id, found, _ = self._arriving
        self._arriving = None
        outputs, *logits = found.tolist()
        if outputs and self._is_first:
            self._say("the model's outputs at step %d are not numbers (NaN). %s", step_id, _CAUSES)
        elif any(logits) and not outputs:
            self._say("logits of this rank at step %d are not numbers (NaN): the output head. %s", step_id, _CAUSES)

    def _looked_at(self, found: TokenLogprobs) -> TokenLogprobs:
        if not self._has_said and np.isnan(found.logprobs[:, 0]).any():
            self._say("log-probabilities are not numbers (NaN). %s", _CAUSES)
        return found

    def _say(self, text: str, *arguments: object) -> None:
        self._has_said = True
        logger.warning(text, *arguments)
