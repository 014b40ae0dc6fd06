"""What an optional part of a model runner may do, and when.

::

    ModelRunner.run     before_rows -> admit -> apply -> must_launch, once for a set of rows that decode
      launched          on_inputs -> reads_all, state_room, around_model -> the model -> on_hidden -> logits
                        -> on_logits -> sampling -> on_sampled
      replayed          the recording -> on_sampled
    recordings          state_room, keep_rows, record, forget

``features.py`` makes all features.  Each appends its functions to the hooks that it needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from tp_engine.layers.attention import Attention
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.graphs.recorder import Recorder
from tp_engine.worker.results.readback import PendingStep


@dataclass(slots=True)
class RunnerHooks:
    """What a runner calls, by hook: the functions of all features that are on, in the features' order."""

    before_rows: list[Callable[[StepPlan], None]] = field(default_factory=list)
    """Enters what the plan has of rows as they were, before some are released and others admitted."""

    admit: list[Callable[[Sequence[Admission]], None]] = field(default_factory=list)
    """Takes in the sequences that get a row in the next step, if there are any."""

    apply: list[Callable[[StepPlan], None]] = field(default_factory=list)
    """Takes in the plan's other changes, after those of the batch and the sampler, before the copies of blocks."""

    mirror_rows: list[Callable[[IntArray, IntArray], None]] = field(default_factory=list)
    """Spare rows (n,) stand for rows (n,) in this step; called by the feature that says so, in ``apply``."""

    must_launch: list[Callable[[StepPlan], bool]] = field(default_factory=list)
    """Whether the step cannot be replayed, because more is read of it, or does more, than is recorded.  Steps of an
    equal ``rows_epoch`` without prompts are alike."""

    on_inputs: list[Callable[[PendingStep, StepInputs], None]] = field(default_factory=list)
    """Sees the inputs of a launched step."""

    reads_all: list[Callable[[StepInputs], bool]] = field(default_factory=list)
    """Whether ``on_hidden`` needs the hidden states of all the step's tokens."""

    state_room: list[Callable[[int], torch.Tensor | None]] = field(default_factory=list)
    """Where the model leaves the states of ``num_tokens`` tokens (num_tokens, state_size); at most one feature says."""

    around_model: list[Callable[[PendingStep, StepInputs], AbstractContextManager[object]]] = field(
        default_factory=list
    )
    """The context in which the model runs."""

    on_hidden: list[Callable[[PendingStep, StepInputs, torch.Tensor], None]] = field(default_factory=list)
    """Sees the hidden states (N, hidden) of all tokens if it ``reads_all``; a collective may be called."""

    on_logits: list[Callable[[PendingStep, StepInputs, torch.Tensor, torch.Tensor], None]] = field(default_factory=list)
    """Sees what a launched step with prompts samples from: the hidden states (n, hidden), and this rank's logits
    (n, width).  A collective may be called."""

    on_sampled: list[Callable[[PendingStep, StepInputs | None, torch.Tensor | None], None]] = field(
        default_factory=list
    )
    """Sees the sampled ids (n,) int32, if there are any; the inputs are None if the step was replayed."""

    take_model: list[Callable[[LanguageModel], Sequence[Attention]]] = field(default_factory=list)
    """Serves another model of the same kind; gives the feature's own layers with K/V, bound after the model's."""

    keep_rows: list[Callable[[torch.Tensor], Callable[[], None]]] = field(default_factory=list)
    """Keeps what a step changes only once for these rows (n,), -1 for none; gives a function that puts it back."""

    record: list[Callable[[int, Recorder], None]] = field(default_factory=list)
    """Records what ``on_sampled`` runs after replayed decodes of that many rows; a collective."""

    forget: list[Callable[[], None]] = field(default_factory=list)
    """Destroys what ``record`` has made; from now on it is launched."""

    report: list[Callable[[], dict[str, Any]]] = field(default_factory=list)
    """What the engine's report has of the feature, by field of ``EngineReport``."""

    memory: list[Callable[[], tuple[torch.Tensor, ...]]] = field(default_factory=list)
    """The memory that holds K/V or states, beside the cache's blocks."""

    check_sleep: list[Callable[[], None]] = field(default_factory=list)
    """Raises ``RequestError`` if the memory cannot be given back for a while."""

    close: list[Callable[[], None]] = field(default_factory=list)
    """Gives memory and threads back; the feature is not used again."""


class RunnerFeature(ABC):
    """The base of all features."""

    @abstractmethod
    def attach(self, hooks: RunnerHooks) -> None:
        """Append to ``hooks`` what this feature does."""


class ModelReader(RunnerFeature):
    """The base of features that call ``_model`` or look into it, and have no layers with K/V of their own."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.take_model.append(self.take_model)

    def take_model(self, model: LanguageModel) -> list[Attention]:
        self._model = model
        return []
