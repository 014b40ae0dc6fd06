"""What an optional part of a model runner may do, and when.

::

    ModelRunner.run     admit -> apply -> must_launch, once for a set of rows that decode
      launched          on_inputs -> reads_all, state_room, around_model -> the model -> on_hidden -> logits
                        -> on_logits -> sampling -> on_sampled
      replayed          the recording -> on_sampled
    recordings          state_room, keep_rows, record, forget

``features.py`` makes all features.  The runner calls only the hooks that a feature overrides.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tp_engine.layers.attention import Attention
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import Admission, StepPlan
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.graphs.recorder import Recorder
from tp_engine.worker.results.readback import PendingStep


class RunnerFeature:
    """The base of all features; each hook does nothing.  ``_model`` is for those that have it."""

    _model: CausalLM

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Take in the sequences that get a row in the next step, if there are any."""

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's other changes, behind those of the batch and the sampler, before the copies of blocks."""

    def must_launch(self, plan: StepPlan) -> bool:
        """Return whether the step can not be replayed, because more is read of it, or does more, than is recorded.
        Steps of an equal ``rows_epoch`` without prompts are alike."""
        return False

    def on_inputs(self, step: PendingStep, inputs: StepInputs) -> None:
        """See the inputs of a launched step."""

    def reads_all(self, inputs: StepInputs) -> bool:
        """Return whether ``on_hidden`` needs the hidden states of all the step's tokens."""
        return False

    def state_room(self, num_tokens: int) -> torch.Tensor | None:
        """Return where the model leaves its states (num_tokens, state_size); one feature at most has such a place."""
        return None

    def around_model(self, step: PendingStep, inputs: StepInputs) -> AbstractContextManager[object]:
        """Return the context in which the model runs."""
        return nullcontext()

    def on_hidden(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """See the hidden states (N, hidden) of all tokens if it ``reads_all``; a collective may be called."""

    def on_logits(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """See what a launched step with prompts samples from: ``hidden`` (n, hidden), and this rank's ``logits``
        (n, width).  A collective may be called."""

    def on_sampled(self, step: PendingStep, inputs: StepInputs | None, token_ids: torch.Tensor | None) -> None:
        """See the sampled ``token_ids`` (n,) int32, if there are any; ``inputs`` are None if the step was replayed."""

    def take_model(self, model: CausalLM) -> list[Attention]:
        """Serve another model of the same kind; return the feature's own layers with K/V, bound behind the model's."""
        self._model = model
        return []

    def keep_rows(self, rows: torch.Tensor) -> Callable[[], None]:
        """Keep what a step changes only once for ``rows`` (n,), -1 for none; return a function that puts it back."""
        return lambda: None

    def record(self, size: int, recorder: Recorder) -> None:
        """Record what ``on_sampled`` runs behind replayed decodes of ``size`` rows; a collective."""

    def forget(self) -> None:
        """Destroy what ``record`` has made; from now on it is launched."""

    def report(self) -> dict[str, Any]:
        """Return what the engine's report has of it, by field of ``EngineReport``."""
        return {}

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return the memory that holds K/V or states, beside the cache's blocks."""
        return ()

    def close(self) -> None:
        """Give memory and threads back; it is not used again."""
