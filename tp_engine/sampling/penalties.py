"""Repetition, frequency and presence penalties, from token counts that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.kernels.sampling_tables import CountTables
from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.sampling.chunks import row_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PenalisedRows:
    """The penalised rows of a step.  ``index`` (m,) int64 are their places among the edited logits, ``rows`` (m,)
    int64 their rows of the batch; the penalties are (m, 1) float32."""

    index: torch.Tensor
    rows: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


class PenaltyCounts:
    """Which of this rank's tokens each row has seen.  Allocated when the first penalised request arrives::

    output_counts (max_num_seqs, width) int32     times that the row generated the token
    in_prompt     (max_num_seqs, width) bool      whether its prompt contains the token
    """

    def __init__(self, max_num_seqs: int, vocab: VocabSlice, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab.width)
        self._vocab = vocab
        self._device = device
        self.output_counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes that the counts take once they are allocated."""
        return self._shape[0] * self._shape[1] * (torch.int32.itemsize + torch.bool.itemsize)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.output_counts is None or self.in_prompt is None:
            self.output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self.in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self.output_counts, self.in_prompt

    def admit(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Count a row's prompt and the tokens that it generated before it was admitted."""
        output_counts, in_prompt = self._tensors()
        known = token_ids.astype(np.int64)
        prompt = self._vocab.columns_of(np.unique(known[:num_prompt_tokens]))
        in_prompt[row].zero_().index_fill_(0, upload(prompt, self._device), True)
        generated, counts = np.unique(known[num_prompt_tokens:], return_counts=True)
        counts = counts[self._vocab.holds(generated)].astype(np.int32)
        output_counts[row].zero_().index_copy_(
            0, upload(self._vocab.columns_of(generated), self._device), upload(counts, self._device)
        )

    @property
    def tables(self) -> CountTables | None:
        """The counts, if they are allocated."""
        if self.output_counts is None or self.in_prompt is None:
            return None
        return CountTables(output_counts=self.output_counts, in_prompt=self.in_prompt)

    def record(self, rows: torch.Tensor, token_ids: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Count one generated token per row: ``rows`` (m,) int64, each once, and ``token_ids`` (m,).

        Only where ``counted`` (m,) bool, if that is given.
        """
        output_counts, _ = self._tensors()
        columns = token_ids - self._vocab.first
        is_mine = (columns >= 0) & (columns < self._shape[1])
        if counted is not None:
            is_mine &= counted
        flat = rows * self._shape[1] + columns.mul_(is_mine)
        output_counts.view(-1).index_add_(0, flat, is_mine.to(torch.int32))

    def apply(self, logits: torch.Tensor, penalised: PenalisedRows) -> None:
        """Penalise rows of ``logits`` (e, width) float32 in place.

        Repetition over prompt and output as in transformers (CTRL, Keskar et al. 2019): positive logits are divided,
        negative ones multiplied.  Then frequency and presence over the output as in OpenAI's API.
        """
        for start, stop in row_chunks(len(penalised.index), logits.shape[1], logits.device):
            self._apply(logits, penalised, slice(start, stop))

    def _apply(self, logits: torch.Tensor, penalised: PenalisedRows, part: slice) -> None:
        output_counts, in_prompt = self._tensors()
        index, rows, repetition = penalised.index[part], penalised.rows[part], penalised.repetition[part]
        counts = output_counts.index_select(0, rows)
        generated = counts > 0
        seen = in_prompt.index_select(0, rows).logical_or_(generated)
        scores = logits.index_select(0, index)
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        scores.sub_(counts.to(torch.float32).mul_(penalised.frequency[part]))
        scores.sub_(generated.to(torch.float32).mul_(penalised.presence[part]))
        logits.index_copy_(0, index, scores)
