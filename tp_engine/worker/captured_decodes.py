"""Decode steps from recordings: the device makes its inputs, runs the model and, for most rows, samples.

::

    host      set_rows, run ------------------------------------------------------------------------> next step
    device    | rows' tables -> inputs -> model |  plain, ranked: logits, sampling, into the tables |   recorded
                                                |  others: logits, the sampler's launches, into the tables   launched

What follows the model depends on the rows, so it is a recording of its own, in two kinds: *plain*, where every row is
greedy or samples by temperature alone, and *ranked*, where some have top_k or top_p.  Other steps launch their sampler
behind the recorded forward pass: penalties, whose counts are allocated for the first row that has some; min_p alone,
which is rare; and what no kernel samples.  On a CPU (``tape_recorder``) the only kind is greedy.  Logits are the
largest tensor of all and live only within the second part, so that all sizes share their room.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tp_engine.attention.base import Backends, prepare_groups
from tp_engine.layers.attention import forward_context
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import NO_IDS, IntArray
from tp_engine.sampling.device_sampler import StepKind
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import RecordedSampler
from tp_engine.worker.decode_batch import DecodeBatch
from tp_engine.worker.decode_graphs import DecodeGraphs
from tp_engine.worker.graph_recorder import Recorder


class CapturedDecodes:
    """Records decode steps of each of ``sizes`` (rising) rows when it is made, on all ranks in the same order."""

    def __init__(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        *,
        model: CausalLM,
        backends: Backends,
        decodes: DecodeBatch,
        sampler: RecordedSampler,
    ) -> None:
        self._model = model
        self._backends = backends
        self._decodes = decodes
        self._sampler = sampler
        decodes.set_rows(NO_IDS, sizes[-1])
        self._forward = DecodeGraphs(sizes, recorder, self._run_model)
        self._finish = {kind: DecodeGraphs(sizes, recorder, partial(self._sample, kind)) for kind in sampler.kinds}

    def close(self) -> None:
        """Destroy the recordings."""
        for graphs in (self._forward, *self._finish.values()):
            graphs.close()

    @property
    def largest(self) -> int:
        """The most rows of a recorded step."""
        return self._forward.largest

    def run(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Decode ``rows`` (n,), whose next tokens have ``positions`` (n,); ``epoch`` is ``StepPlan.rows_epoch``.

        Token ids (n,) int32, to be read before the next step is launched or copied behind this one; rank 0's
        log-probabilities, if any row asks for them.  The rows' tables on the device have the tokens already.
        """
        num_rows = len(rows)
        self._decodes.set_rows(rows, self._forward.padded_size(num_rows), epoch)
        hidden = self._forward.run(num_rows)
        kind = self._sampler.recorded_kind(rows, positions, epoch)
        finish = None if kind is None else self._finish.get(kind)
        if finish is not None and self._forward.is_settled(num_rows):
            return finish.run(num_rows), None
        tokens, logprobs = self._sampler.sample(self._model.compute_local_logits(hidden), rows, positions)
        self._decodes.advance(num_rows, tokens)
        return tokens, logprobs

    def _run_model(self, size: int) -> torch.Tensor:
        """Hidden states (size, hidden); those of padding rows mean nothing."""
        inputs = self._decodes.prepare(size)
        metadata = self._decodes.metadata(inputs, self._decodes.recorded_seq_lens(inputs))
        prepare_groups(self._backends, metadata)
        with forward_context(metadata):
            hidden: torch.Tensor = self._model(inputs.input_ids, inputs.positions)
        return hidden

    def _sample(self, kind: StepKind, size: int) -> torch.Tensor:
        """Token ids (size,), from the hidden states that ``_run_model`` left."""
        inputs = self._decodes.inputs(size)
        logits = self._model.compute_local_logits(self._forward.output(size))
        tokens = self._sampler.sample_recorded(kind, logits, inputs.rows, inputs.positions)
        self._decodes.advance(size, tokens)
        return tokens
