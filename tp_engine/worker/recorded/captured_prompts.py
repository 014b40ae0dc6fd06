"""Steps with prompts from recordings, mixed with decodes or alone, as ``captured_decodes`` has steps of decodes.

::

    host      set_step, run ------------------------------------------------------------------------> next step
    device    | requests -> inputs -> model -> hidden |  plain, ranked: logits, sampling, into the tables   recorded
                                                      |  others: logits, the sampler's launches             launched

The first part has a recording for each size (``padded_batch``), and leaves what is sampled in one tensor, ``hidden``.
So what follows depends on the number of decodes alone, and has a recording for each and for each kind of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from tp_engine.attention.base import Backends, prepare_groups
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.layers.attention import forward_context
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import FIRST_STEP_ID, IntArray, StepPlan
from tp_engine.sampling.device_sampler import StepKind
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import RecordedSampler
from tp_engine.worker.batch.padded_batch import PaddedBatch, StepSize, StepSizes
from tp_engine.worker.recorded.captured_decodes import Recorder, Recording

_NO_ROWS = StepPlan(step_id=FIRST_STEP_ID)


class CapturedPrompts:
    """Recorded steps with prompts of ``sizes``; made on all ranks in the same order, by ``record``."""

    def __init__(
        self,
        sizes: StepSizes,
        *,
        model: CausalLM,
        backends: Backends,
        tables: RowTables,
        sampler: RecordedSampler,
    ) -> None:
        self.sizes = sizes
        self._model = model
        self._backends = backends
        self._sampler = sampler
        largest = sizes.largest_first[0]
        self._batch = PaddedBatch(tables, largest)
        device = tables.token_ids.device
        self._hidden = torch.zeros((largest.num_requests, model.hidden_size), dtype=model.dtype, device=device)
        self._nothing_sampled = torch.zeros(largest.num_requests, dtype=torch.int32, device=device)
        self._forward: dict[StepSize, Recording] = {}
        self._finish: dict[tuple[StepKind, int], Recording] = {}

    def record(self, recorder: Recorder, sizes: Sequence[StepSize]) -> None:
        """Record steps of ``sizes``, and the sampling that follows those for which there is none yet."""
        for size in sizes:
            self._batch.set_step(_NO_ROWS, size)
            self._forward[size] = recorder.record(partial(self._run_model, size))
            for kind in self._sampler.kinds:
                if (kind, size.decodes) not in self._finish:
                    self._finish[kind, size.decodes] = recorder.record(partial(self._sample, kind, size.decodes))

    def close(self) -> None:
        """Destroy the recordings, with their device memory and collectives."""
        self._forward.clear()
        self._finish.clear()

    def run(
        self, plan: StepPlan, size: StepSize, num_computed: IntArray
    ) -> tuple[torch.Tensor | None, LogprobTensors | None]:
        """Run the step ``plan`` in the recording of ``size``; ``num_computed`` is ``InputBatch``'s, before the step.

        Returns token ids (n,) int32, None if nothing is sampled, and rank 0's log-probabilities, if any row asks for
        them.  The ids are to be read before the next step is launched, or copied behind this one.  The rows' tables on
        the device contain them already, and count the step's tokens.
        """
        rows = plan.sampled_rows
        counts = np.ones(len(rows), dtype=np.int32)
        counts[len(plan.decode_rows) :] = plan.prefill_tokens[plan.prefill_samples]
        positions = num_computed[rows] + counts
        self._batch.set_step(plan, size)
        self._forward[size].run()
        if not len(rows):
            self._batch.advance(size.decodes, self._nothing_sampled)
            return None, None
        kind = self._sampler.recorded_kind(rows, positions)
        finish = None if kind is None else self._finish.get((kind, size.decodes))
        if finish is not None:
            return finish.run()[: len(rows)], None
        logits = self._model.compute_local_logits(self._hidden[: len(rows)])
        tokens, logprobs = self._sampler.sample(logits, rows, positions)
        self._batch.advance(size.decodes, tokens)
        return tokens, logprobs

    def _run_model(self, size: StepSize) -> torch.Tensor:
        """Hidden states (B, hidden) of the wanted tokens; those of padding are arbitrary."""
        inputs = self._batch.prepare(size)
        metadata = self._batch.metadata(size)
        prepare_groups(self._backends, metadata)
        wanted = self._batch.requests(size.decodes).wanted
        with forward_context(metadata):
            hidden = self._model(inputs.input_ids, inputs.positions, wanted)
        return self._hidden[: size.num_requests].copy_(hidden)

    def _sample(self, kind: StepKind, num_decodes: int) -> torch.Tensor:
        """Token ids (B,), from the hidden states that ``_run_model`` left."""
        requests = self._batch.requests(num_decodes)
        logits = self._model.compute_local_logits(self._hidden[: len(requests.rows)])
        positions = self._batch.sampled_positions(num_decodes)
        tokens = self._sampler.sample_recorded(kind, logits, requests.sampled_rows, positions)
        self._batch.advance(num_decodes, tokens)
        return tokens
