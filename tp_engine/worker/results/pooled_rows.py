"""What a request returns that generates nothing: a hidden state, scores of it, or the logits of a few tokens.

A pooling request ends with its prompt.  Its row is sampled once, as any row at the end of its prompt, and what the
sampler chooses there is not used.  So chunks, prefix cache, preemption and plans ahead treat it as a request of one
token, and it shares steps with rows that generate.

The hidden state after the final norm is the same on all ranks: rank 0 keeps it, or the scores that a classifier's head
makes of it.  A row may also want the scores of every token of its prompt, chunk by chunk.  Of the logits each rank has
a slice, so the ranks add up a small table in which each has written the columns that it holds::

    wanted token ids            7    150                     vocabulary 203 on 2 ranks, rank 1 holds 112 to 202
    rank 0               [ 1.25   0.00 ]
    rank 1               [ 0.00  -3.50 ]      the sum        [ 1.25  -3.50 ]   exact: all other terms are 0
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tp_engine.distributed.collectives import Communicator
from tp_engine.layers.upload import upload, upload_all
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import POOLS_ALL, POOLS_LAST, Admission, FloatArray, IntArray, StepPlan
from tp_engine.sampling.logprobs import Fetch
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import ModelReader, RunnerHooks
from tp_engine.worker.results.readback import PendingStep


class PooledRows(ModelReader):
    """Which of ``num_rows`` rows pool outputs of ``model``, and what; of at most ``max_positions`` tokens at once."""

    def __init__(self, num_rows: int, model: LanguageModel, communicator: Communicator, max_positions: int) -> None:
        super().__init__(model)
        self._pools = np.zeros(num_rows, dtype=np.int8)
        self._token_ids: dict[int, IntArray] = {}
        self._vocab = model.lm_head.slice
        self._communicator, self._max_positions = communicator, max_positions

    def attach(self, hooks: RunnerHooks) -> None:
        super().attach(hooks)
        hooks.admit.append(self.admit)
        hooks.must_launch.append(self.must_launch)
        hooks.reads_all.append(self.reads_all)
        hooks.on_hidden.append(self.on_hidden)
        hooks.on_logits.append(self.on_logits)

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Note what the new occupants of rows ask for."""
        for admission in admitted:
            row, sampling = admission.row, admission.sampling
            self._pools[row] = sampling.pools
            if sampling.pools:
                self._token_ids[row] = sampling.pooled_token_ids.copy()

    def must_launch(self, plan: StepPlan) -> bool:
        """Return whether a prompt of the step pools."""
        return len(plan.prefill_rows) > 0 and bool(self._pools[plan.prefill_rows].any())

    def reads_all(self, inputs: StepInputs) -> bool:
        """Return whether a row of a step with prompts pools all its tokens."""
        return not inputs.layout.is_decode_only and bool((self._pools[inputs.layout.rows] == POOLS_ALL).any())

    def on_hidden(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor) -> None:
        rows, query_lens = inputs.layout.rows, inputs.layout.query_lens
        places = np.flatnonzero(self._pools[rows] == POOLS_ALL).tolist()
        if not places or not self._communicator.info.is_first:
            return
        ends = np.cumsum(query_lens)
        parts = [hidden[ends[place] - query_lens[place] : ends[place]] for place in places]
        scores = [torch.cat([self._scores(one) for one in part.split(self._max_positions)]) for part in parts]
        fetched, named = step.fetch(scores), rows[places].tolist()
        step.pooled.append(lambda: dict(zip(named, fetched(), strict=True)))

    def on_logits(self, step: PendingStep, inputs: StepInputs, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Pool what the step's rows ask for; a collective if one wants logits."""
        rows, is_first = inputs.layout.sampled_rows, self._communicator.info.is_first
        places = np.flatnonzero(self._pools[rows] == POOLS_LAST).tolist()
        if not places:
            return
        wanted = {place: self._token_ids[int(rows[place])] for place in places}
        plain = [place for place in places if not len(wanted[place])]
        scored = [place for place in places if len(wanted[place])]
        states = self._scores(hidden.index_select(0, _index(plain, hidden))) if plain and is_first else None
        table = self._table([wanted[place] for place in scored], scored, logits)
        if is_first:
            counts = [len(wanted[place]) for place in scored]
            step.pooled.append(fetch_pooled(step.fetch, rows[plain + scored].tolist(), states, table, counts))

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (n, hidden) in float32, or the scores (n, labels) of a classifier's head."""
        scores: torch.Tensor = hidden.float() if self._model.score_head is None else self._model.score_head(hidden)
        return scores

    def _table(self, wanted: list[IntArray], places: list[int], logits: torch.Tensor) -> torch.Tensor | None:
        """The logits of the ``wanted`` ids at ``places``, float32 (m, most), of all ranks; 0 after those of a row."""
        if not wanted:
            return None
        lengths = np.array([len(ids) for ids in wanted])
        token_ids = np.concatenate(wanted)
        row, column = np.repeat(np.arange(len(wanted)), lengths), np.concatenate([np.arange(n) for n in lengths])
        held = self._vocab.holds(token_ids)
        table = torch.zeros((len(wanted), int(lengths.max())), device=logits.device, dtype=torch.float32)
        source = (np.array(places)[row[held]], token_ids[held] - self._vocab.first)
        axes = (axis.astype(np.int64) for axis in (*source, row[held], column[held]))
        rows, columns, *targets = upload_all(tuple(axes), logits.device)
        table[tuple(targets)] = logits[rows, columns].float()
        return self._communicator.all_reduce(table)


def _index(places: list[int], like: torch.Tensor) -> torch.Tensor:
    return upload(np.array(places, dtype=np.int64), like.device)


def fetch_pooled(
    fetch: Fetch, rows: list[int], states: torch.Tensor | None, logits: torch.Tensor | None, num_logits: list[int]
) -> Callable[[], dict[int, FloatArray]]:
    """Begin to copy what ``rows`` return; the returned function waits, and gives float32 by row.

    ``states`` (n, size) are of the first rows, ``logits`` (m, width) of the others, of which each has as many as
    ``num_logits`` says.  Either is None where no row wants it.
    """
    fetched = fetch([one for one in (states, logits) if one is not None])

    def wait() -> dict[int, FloatArray]:
        arrays = fetched()
        parts: list[FloatArray] = [] if states is None else list(arrays[0])
        if logits is not None:
            parts += [table[:count] for table, count in zip(arrays[-1], num_logits, strict=True)]
        return dict(zip(rows, parts, strict=True))

    return wait
