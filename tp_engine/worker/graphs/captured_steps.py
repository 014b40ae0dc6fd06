"""Captured steps of fixed sizes, of one of two shapes: decodes alone, or prompts with decodes beside them.

::

    host      set_step, run ------------------------------------------------------------------------> next step
    device    | rows' tables -> inputs -> model |  plain, ranked: logits, sampling, into the tables |   recorded
                                                |  others: logits, the sampler's launches, into the tables   launched

What follows the model depends on the rows, so it is a recording of its own, of one of three kinds: *plain*, if every
row is greedy or samples by temperature alone, *nucleus*, if some have top_p, and *ranked*, if some have top_k (on
several ranks a fourth, if there are both).  Other steps launch their sampler after the recorded forward pass: those
with penalties, whose counts are allocated for the first row that has some; with min_p alone, which is rare; and those
that no kernel samples.  On a CPU the only kind is greedy.  Logits are the largest tensor and live only within the
second part, so that all sizes share their memory.
"""

import bisect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, Backends, prepare_groups
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.layers.attention import forward_context
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import FIRST_STEP_ID, IntArray, StepPlan
from tp_engine.sampling.device_sampler import SamplerVariant
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import Sampler
from tp_engine.worker.batch.decode_batch import DecodeBatch
from tp_engine.worker.graphs.recorder import Recorder, Recording

Size = TypeVar("Size", bound=Hashable)

_NO_ROWS = StepPlan(step_id=FIRST_STEP_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedInputs:
    """The model's inputs at one place: ``input_ids`` (N,) int32, the ``positions`` (N,) int64 by which heads turn, the
    ``wanted`` tokens (B,) int64, None: all, and each group's ``attention``."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor | None
    attention: Sequence[AttentionMetadata]


class StepShape(Protocol[Size]):
    """Where the inputs of steps of each size are.

    ``advanced`` are the tables that the end of the sampler may advance by itself.
    """

    advanced: RowTables | None = None

    def hidden_room(self, model: LanguageModel) -> torch.Tensor | None:
        """Return where the hidden states (B, hidden) of steps of all sizes go; None: each size leaves its own."""
        return None

    def size_for(self, plan: StepPlan) -> Size | None:
        """Return the smallest size that holds the step ``plan``; None if none does."""

    def num_sampled(self, size: Size) -> int:
        """Return the number of tokens that a step of ``size`` samples, padding included: B."""

    def set_step(self, plan: StepPlan, size: Size) -> None:
        """Say that the next step is ``plan``, padded to ``size``: the host's part of a step."""

    def prepare(self, size: Size) -> PlacedInputs:
        """Make the step's inputs, on the device."""

    def sampled(self, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sampled rows (B,) int32, -1 for padding, and the positions (B,) int64 of their last tokens."""

    def advance(self, size: Size, tokens: torch.Tensor | None) -> None:
        """Count the step's tokens, and enter the sampled ``tokens`` (n,) int32, if any, after them, on the device."""


class DecodeShape(StepShape[int]):
    """Decodes of each of ``sizes`` (rising) rows of ``batch``."""

    def __init__(self, batch: DecodeBatch, sizes: Sequence[int]) -> None:
        self._batch, self._sizes = batch, list(sizes)
        self.advanced = batch.tables

    def size_for(self, plan: StepPlan) -> int | None:
        num_rows = len(plan.decode_rows)
        if len(plan.prefill_rows) or num_rows > self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def num_sampled(self, size: int) -> int:
        return size

    def set_step(self, plan: StepPlan, size: int) -> None:
        self._batch.set_rows(plan, size)

    def prepare(self, size: int) -> PlacedInputs:
        inputs = self._batch.prepare(size)
        attention = self._batch.metadata(inputs, self._batch.recorded_seq_lens(inputs))
        return PlacedInputs(
            input_ids=inputs.input_ids, positions=inputs.rotary_positions, wanted=None, attention=attention
        )

    def sampled(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._batch.inputs(size)
        return inputs.rows, inputs.positions

    def advance(self, size: int, tokens: torch.Tensor | None) -> None:
        assert tokens is not None, "every row that decodes is sampled"
        self._batch.advance(len(tokens), tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step runs; ``state_room`` and ``keep_rows`` are ``RunnerHooks``."""

    model: LanguageModel
    backends: Backends
    sampler: Sampler
    state_room: Callable[[int], torch.Tensor | None]
    keep_rows: Callable[[torch.Tensor], Callable[[], None]]


class CapturedSteps(Generic[Size]):
    """Captured steps of one shape; made on all ranks in the same order.

    ``forward`` has a recording of the model's part for each size, ``sampling`` one for each kind and number of tokens.
    """

    def __init__(self, shape: StepShape[Size], parts: StepParts) -> None:
        self.shape, self._model, self._sampler, self._parts = shape, parts.model, parts.sampler, parts
        self.forward: dict[Size, Recording] = {}
        self.sampling: dict[tuple[SamplerVariant | None, int], Recording] = {}
        self._hidden = shape.hidden_room(parts.model)

    def capture(self, sizes: Sequence[Size], recorder: Recorder) -> None:
        """Capture steps of ``sizes``, the largest first, and the sampling after those for which there is none yet."""
        for size in sizes:
            self.shape.set_step(_NO_ROWS, size)
            self.forward[size] = recorder.record(partial(self._run_model, size), partial(self._keep_rows, size))
            count = self.shape.num_sampled(size)
            for kind in self._sampler.kinds:
                if (kind, count) not in self.sampling:
                    self.sampling[kind, count] = recorder.record(partial(self._sample, kind, size))

    def close(self) -> None:
        """Destroy the recordings, with their device memory and collectives."""
        self.forward.clear()
        self.sampling.clear()

    def run(
        self, plan: StepPlan, size: Size, num_computed: IntArray
    ) -> tuple[torch.Tensor | None, LogprobTensors | None]:
        """Run the step ``plan`` in the recording of ``size``; ``num_computed`` is ``InputBatch``'s, before the step.

        Returns token ids (n,) int32, None if nothing is sampled, and rank 0's log-probabilities, if any row asks for
        them.  The ids are to be read before the next step is launched, or copied after this one.  The rows' tables on
        the device contain them already, and count the step's tokens.
        """
        self.shape.set_step(plan, size)
        forward = self.forward[size]
        hidden = forward.run()
        is_decode_only = not len(plan.prefill_rows)
        rows = plan.decode_rows if is_decode_only else plan.sampled_rows
        count = len(rows)
        if not count:
            self.shape.advance(size, None)
            return None, None
        positions = partial(_positions, plan, rows, num_computed)
        kind = self._sampler.recorded_kind(rows, positions, plan.rows_epoch if is_decode_only else 0)
        sampling = self.sampling.get((kind, self.shape.num_sampled(size)))
        if sampling is not None and forward.is_settled:
            tokens = sampling.run()
            return tokens if tokens.shape[0] == count else tokens[:count], None
        logits = self._model.compute_local_logits(hidden if hidden.shape[0] == count else hidden[:count])
        tokens, logprobs = self._sampler.sample(logits, rows, positions())
        self.shape.advance(size, tokens)
        return tokens, logprobs

    def _keep_rows(self, size: Size) -> Callable[[], None]:
        return self._parts.keep_rows(self.shape.sampled(size)[0])

    def _run_model(self, size: Size) -> torch.Tensor:
        """Return the hidden states (B, hidden) of the wanted tokens; those of padding are arbitrary."""
        inputs = self.shape.prepare(size)
        prepare_groups(self._parts.backends, inputs.attention)
        room = self._parts.state_room(len(inputs.input_ids))
        with forward_context(inputs.attention):
            hidden: torch.Tensor = self._model(inputs.input_ids, inputs.positions, inputs.wanted, room)
        return hidden if self._hidden is None else self._hidden[: len(hidden)].copy_(hidden)

    def _sample(self, kind: SamplerVariant, size: Size) -> torch.Tensor:
        """Return token ids (B,), from the hidden states that ``_run_model`` left."""
        hidden = self.forward[size].output if self._hidden is None else self._hidden[: self.shape.num_sampled(size)]
        tables = self.shape.advanced if kind in self._sampler.advancing else None
        logits = self._model.compute_local_logits(hidden)
        tokens = self._sampler.sample_recorded(kind, logits, *self.shape.sampled(size), advanced=tables)
        if tables is None:
            self.shape.advance(size, tokens)
        return tokens


def _positions(plan: StepPlan, rows: IntArray, num_computed: IntArray) -> IntArray:
    """Return the positions (n,) of the tokens that the sampled ``rows`` (n,) of a step get."""
    counts = np.ones(len(rows), dtype=np.int32)
    counts[len(plan.decode_rows) :] = plan.prefill_tokens[plan.prefill_samples]
    return num_computed[rows] + counts
