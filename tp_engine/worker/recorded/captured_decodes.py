"""Decode steps from recordings: the device makes its inputs, runs the model and, for most steps, samples.

::

    host      set_rows, run ------------------------------------------------------------------------> next step
    device    | rows' tables -> inputs -> model |  plain, ranked: logits, sampling, into the tables |   recorded
                                                |  others: logits, the sampler's launches, into the tables   launched

What follows the model depends on the rows, so it is a recording of its own, of one of three kinds: *plain*, if every
row is greedy or samples by temperature alone, *nucleus*, if some have top_p, and *ranked*, if some have top_k.  Other
steps launch their sampler behind the recorded forward pass: those with penalties, whose counts are allocated for the
first row that has some; with min_p alone, which is rare; and those that no kernel samples.  On a CPU the only kind is
greedy.  Logits are the largest tensor and live only within the second part, so that all sizes share their memory.

A recorded step reads its inputs from, and leaves its outputs in, the tensors that it used when it was recorded.
``CudaRecorder`` makes CUDA graphs; ``tape_recorder`` makes tapes, which do the same for CPUs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch

from tp_engine.attention.base import Backends, prepare_groups
from tp_engine.layers.attention import forward_context
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import NO_IDS, IntArray, StepPlan
from tp_engine.sampling.device_sampler import StepKind
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import RecordedSampler
from tp_engine.worker.batch.decode_batch import DecodeBatch
from tp_engine.worker.batch.row_states import RowStates
from tp_engine.worker.results.readback import Check, never_fails, record_event, wait_for

Step: TypeAlias = Callable[[], torch.Tensor]
Keep: TypeAlias = Callable[[], Callable[[], None]]
"""Keeps what a step may change only once, and returns a function that puts it back."""


def keep_nothing() -> Callable[[], None]:
    """Of a step that may run again."""
    return lambda: None


class CapturedDecodes:
    """Recorded decode steps of each of ``sizes`` (rising) rows; made on all ranks in the same order."""

    def __init__(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        *,
        model: CausalLM,
        backends: Backends,
        decodes: DecodeBatch,
        sampler: RecordedSampler,
        states: RowStates | None = None,
        head_states: torch.Tensor | None = None,
    ) -> None:
        """``head_states`` (rows, state_size) is where the model leaves its states for a draft head."""
        self._model = model
        self._backends = backends
        self._decodes = decodes
        self._sampler = sampler
        decodes.set_rows(NO_IDS, sizes[-1])
        self._states, self._head_states = states, head_states
        self._forward = DecodeGraphs(sizes, recorder, self._run_model, self._keep_states)
        self._finish = {kind: DecodeGraphs(sizes, recorder, partial(self._sample, kind)) for kind in sampler.kinds}

    def close(self) -> None:
        """Destroy the recordings."""
        for graphs in (self._forward, *self._finish.values()):
            graphs.close()

    def holds(self, plan: StepPlan) -> bool:
        """Whether the step only decodes, and has no more rows than the largest recorded one."""
        return not len(plan.prefill_rows) and len(plan.decode_rows) <= self._forward.largest

    def run(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Decode ``rows`` (n,), whose next tokens have ``positions`` (n,); ``epoch`` is ``StepPlan.rows_epoch``.

        Returns token ids (n,) int32, to be read before the next step is launched or copied behind this one, and rank
        0's log-probabilities, if any row asks for them.  The rows' tables on the device contain the tokens already.
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

    def _keep_states(self, size: int) -> Callable[[], None]:
        return keep_nothing() if self._states is None else self._states.keep(self._decodes.inputs(size).rows)

    def _run_model(self, size: int) -> torch.Tensor:
        """Hidden states (size, hidden); those of padding rows are arbitrary."""
        inputs = self._decodes.prepare(size)
        metadata = self._decodes.metadata(inputs, self._decodes.recorded_seq_lens(inputs))
        prepare_groups(self._backends, metadata)
        room = None if self._head_states is None else self._head_states[:size]
        with forward_context(metadata):
            hidden: torch.Tensor = self._model(inputs.input_ids, inputs.positions, None, room)
        return hidden

    def _sample(self, kind: StepKind, size: int) -> torch.Tensor:
        """Token ids (size,), from the hidden states that ``_run_model`` left."""
        inputs, hidden = self._decodes.inputs(size), self._forward.output(size)
        tables = self._decodes.tables if kind in self._sampler.advancing else None
        logits = self._model.compute_local_logits(hidden)
        tokens = self._sampler.sample_recorded(kind, logits, inputs.rows, inputs.positions, advanced=tables)
        if tables is None:
            self._decodes.advance(size, tokens)
        return tokens


class DecodeGraphs:
    """One recording per size of ``sizes`` (rising); a batch runs in the smallest that holds it.

    ``step(size)`` runs a decode step of ``size`` rows, padding included, from inputs at a fixed place, and returns its
    output, whose first dimension is ``size``.  ``keep(size)`` is as ``Keep``; without it, a step may run again.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        step: Callable[[int], torch.Tensor],
        keep: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        self._sizes = list(sizes)
        self._recordings: dict[int, Recording] = {}
        for size in reversed(self._sizes):
            own = keep_nothing if keep is None else partial(keep, size)
            self._recordings[size] = recorder.record(partial(step, size), own)

    def close(self) -> None:
        """Destroy the recordings, with their device memory and collectives."""
        self._recordings.clear()

    @property
    def largest(self) -> int:
        """The most rows that a recorded step holds."""
        return self._sizes[-1]

    def padded_size(self, num_rows: int) -> int:
        """The size of the recording that ``num_rows`` rows run in."""
        assert 0 < num_rows <= self.largest
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def output(self, size: int) -> torch.Tensor:
        """The last output of the step of ``size`` rows."""
        return self._recordings[size].output

    def is_settled(self, num_rows: int) -> bool:
        """Whether the output of the step for ``num_rows`` rows is always at the same place."""
        return self._recordings[self.padded_size(num_rows)].is_settled

    def run(self, num_rows: int) -> torch.Tensor:
        """Run the step, whose inputs are in place; the first ``num_rows`` rows of its output."""
        size = self.padded_size(num_rows)
        output = self._recordings[size].run()
        return output if size == num_rows else output[:num_rows]


class Recording(Protocol):
    """A recorded step.  ``output`` is its last output; if it ``is_settled``, always the same tensor."""

    output: torch.Tensor
    is_settled: bool

    def run(self) -> torch.Tensor:
        """Run the step; returns its output tensor, which the next run overwrites."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        """Record ``step``.  It may run once before, for one-time work, and allocates only what it returns.

        Where it is run again in earnest, what ``keep`` keeps is put back before.
        """


class _CudaRecording:
    is_settled = True

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def run(self) -> torch.Tensor:
        self._graph.replay()
        return self.output


class CudaRecorder:
    """CUDA graphs that share one pool of memory: record the largest first, the smaller ones then reuse its memory.

    ``check`` is asked while the device runs the step before its recording, because torch then waits in the driver.
    """

    def __init__(self, check: Check = never_fails) -> None:
        self._check = check
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step, keep: Keep = keep_nothing) -> Recording:
        step()  # all rows are padding, so there is nothing to keep
        wait_for(record_event(), self._check)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _CudaRecording(graph, output)
