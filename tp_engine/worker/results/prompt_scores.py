"""Log-probabilities of prompt tokens, a bounded number of positions at a time.

Logits are the widest tensors of a step, and a prompt may have as many positions as a step has tokens.  The number of
positions scored at once is therefore fixed at the start, and the largest step (``trial_steps``) scores as many.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import Admission, IntArray, StepPlan
from tp_engine.sampling.logprobs import LogprobTensors, logprobs_of
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import ModelReader, RunnerHooks
from tp_engine.worker.results.readback import PendingStep

_LEAST_POSITIONS = 16  # with fewer, most of the time goes into reading the output head's weight


class ScoredPrompts(ModelReader):
    """Which rows of ``batch`` ask for log-probabilities of their prompts, and these, chunk by chunk, by ``model``."""

    def __init__(self, model: LanguageModel, batch: InputBatch) -> None:
        super().__init__(model)
        self._batch = batch
        self._num_alternatives = np.full(len(batch.num_prompt), -1, dtype=np.int32)

    def attach(self, hooks: RunnerHooks) -> None:
        super().attach(hooks)
        hooks.admit.append(self.admit)
        hooks.must_launch.append(self.must_launch)
        hooks.reads_all.append(self.reads_all)
        hooks.on_hidden.append(self.on_hidden)

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Note what the new occupants of rows ask for."""
        for admission in admitted:
            self._num_alternatives[admission.row] = admission.sampling.prompt_logprobs

    def must_launch(self, plan: StepPlan) -> bool:
        """Return whether a prompt of the step is scored."""
        return len(plan.prefill_rows) > 0 and self._any_of(plan.prefill_rows)

    def reads_all(self, inputs: StepInputs) -> bool:
        """Return whether a row of a step with prompts is scored."""
        return not inputs.layout.is_decode_only and self._any_of(inputs.layout.rows)

    def on_hidden(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Score the prompt tokens that follow this step's positions, for the rows that asked.  A collective, because
        computing logits is one."""
        rows, query_lens = inputs.layout.rows, inputs.layout.query_lens
        max_positions, step.prompt_logprobs = positions_at_once(self._batch.max_num_seqs), {}
        for request in np.flatnonzero(self._num_alternatives[rows] >= 0).tolist():
            row, start = int(rows[request]), int(query_lens[:request].sum())
            first = int(self._batch.num_computed[row])
            num_scored = min(int(query_lens[request]), int(self._batch.num_prompt[row]) - 1 - first)
            if num_scored <= 0:
                continue
            following = self._batch.following_tokens(row, first + 1, num_scored)
            k = int(self._num_alternatives[row])
            found = score_prompt(self._model, hidden[start : start + num_scored], following, k, max_positions)
            if found is not None:
                step.prompt_logprobs[row] = found.to_host(step.fetch)

    def _any_of(self, rows: IntArray) -> bool:
        """Return whether one of ``rows`` (n,) asks for scores; its prompt may be computed already."""
        return bool((self._num_alternatives[rows] >= 0).any())


def positions_at_once(max_num_seqs: int) -> int:
    """Positions whose logits exist at once: as many as a step samples, at least 16."""
    return max(max_num_seqs, _LEAST_POSITIONS)


def score_prompt(
    model: LanguageModel, hidden: torch.Tensor, following: torch.Tensor, k: int, max_positions: int
) -> LogprobTensors | None:
    """Score ``following`` (n,) int32, the tokens after the outputs ``hidden`` (n, hidden), and the ``k`` likeliest.

    n is at least 1.  Rank 0 gets the result, the others None.  A collective for every ``max_positions`` positions.
    """
    parts: list[LogprobTensors] = []
    for start in range(0, len(hidden), max_positions):
        logits = model.compute_logits(hidden[start : start + max_positions])
        if logits is not None:
            parts.append(logprobs_of(logits, following[start : start + max_positions], k))
        del logits  # before the next ones are made
    return LogprobTensors.joined(parts) if parts else None


def score_largest(model: LanguageModel, logits: torch.Tensor, following: torch.Tensor, k: int) -> None:
    """Use as much memory as ``score_prompt`` at once, beside local ``logits`` (n, width) of that many positions.

    Scores only a few positions, because sampling has scored as many as a step samples.  A collective.
    """
    gathered = model.lm_head.gather(logits)
    if gathered is not None:
        logprobs_of(gathered[:_LEAST_POSITIONS], following[:_LEAST_POSITIONS], k)


def empty_scores(num_positions: int, vocab_size: int, k: int, device: torch.device) -> LogprobTensors:
    """Tensors as large as the result of ``score_prompt`` for ``num_positions`` positions."""
    shape = (num_positions, 1 + min(k, vocab_size))
    return LogprobTensors(
        token_ids=torch.zeros(shape, dtype=torch.int32, device=device),
        logprobs=torch.zeros(shape, device=device, dtype=torch.float32),
        ranks=torch.zeros(num_positions, dtype=torch.int32, device=device),
    )
