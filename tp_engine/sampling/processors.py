"""What changes logits before a token is chosen: a grammar's masks, lists of token ids, penalties.

::

    masks      which tokens a grammar allows in some rows of one step
    edits      allowed_token_ids, logit_bias and min_tokens: ragged lists, flattened once per set of rows
    penalties  repetition, frequency and presence, from token counts that stay on the device

Everything works on this rank's slice of the vocabulary.  The masks come with the plan::

    plan    rows 7 and 2, each one bit per token id           | word 0 | word 1 | ...
    rank    the bytes of its slice, unpacked on the device      first // 8 ... (first + num_ids - 1) // 8
    logits  -inf where the bit is not set, before anything else changes them; log-probabilities stay raw

A slice begins at a multiple of 16 tokens, so it is a range of whole bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.kernels.sampling.tables import CountTables
from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.upload import upload, upload_all
from tp_engine.plan import MASK_TOKENS, NO_IDS, IntArray, RowSampling
from tp_engine.sampling.ranking import row_chunks

_BITS = 8


class GrammarBitmasks:
    """The masks of the next step that is sampled, for ``rows``."""

    def __init__(self, max_num_seqs: int, vocab: VocabSlice, device: torch.device) -> None:
        assert vocab.first % _BITS == 0, f"a slice that begins at token {vocab.first}"
        self._vocab = vocab
        self._device = device
        self.rows = NO_IDS
        self._masks: IntArray = np.empty((0, 0), dtype=np.int32)
        self._place = np.full(max_num_seqs, -1, dtype=np.int64)  # of a row among the masks

    def set(self, rows: IntArray, masks: IntArray) -> None:
        """Replace the last step's masks with the next step's: ``masks`` (m, words) of ``rows`` (m,)."""
        if not (len(rows) or len(self.rows)):
            return
        assert len(rows) == 0 or masks.shape[1] * MASK_TOKENS >= self._vocab.vocab_size, f"masks {masks.shape}"
        self._place[self.rows] = -1
        self._place[rows] = np.arange(len(rows))
        self.rows, self._masks = rows, masks

    def any_of(self, rows: IntArray) -> bool:
        """Whether any of ``rows`` (n,) is masked in this step."""
        return bool(len(self.rows)) and bool((self._place[rows] >= 0).any())

    def apply(self, logits: torch.Tensor, rows: IntArray, *, in_place: bool) -> torch.Tensor:
        """The logits (n, width) of ``rows`` (n,) with -inf for forbidden tokens; a copy unless ``in_place``."""
        masked = logits if in_place else logits.clone()
        places = np.flatnonzero(self._place[rows] >= 0)
        bits = upload(self._bytes_of(self._place[rows[places]]), self._device)
        members = upload(places, self._device)
        for start, stop in row_chunks(len(places), masked.shape[1], self._device):
            part = members[start:stop]
            banned = ~_unpack(bits[start:stop])[:, : self._vocab.num_ids]
            held = masked.index_select(0, part)
            held[:, : self._vocab.num_ids].masked_fill_(banned, -torch.inf)
            masked.index_copy_(0, part, held)
        return masked

    def _bytes_of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        first, stop = self._vocab.first // _BITS, -(-(self._vocab.first + self._vocab.num_ids) // _BITS)
        found: npt.NDArray[np.uint8] = self._masks.view(np.uint8)[places, first:stop]
        return found


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """(m, c) uint8 -> (m, 8 * c) bool, the lowest bit of a byte first."""
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1).to(torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEdits:
    """Entries to change in edited logits (e, width); flat indices are ``place * width + column``, int64."""

    restricted: torch.Tensor | None
    allowed: torch.Tensor | None
    biased: torch.Tensor | None
    bias: torch.Tensor | None
    banned: torch.Tensor | None

    def apply(self, logits: torch.Tensor) -> None:
        """Edit ``logits`` (e, width) float32, contiguous, in place: allowed tokens, then bias, then min_tokens."""
        flat = logits.view(-1)
        if self.restricted is not None and self.allowed is not None:
            kept = flat[self.allowed]
            logits.index_fill_(0, self.restricted, -torch.inf)
            flat[self.allowed] = kept
        if self.biased is not None and self.bias is not None:
            flat.index_add_(0, self.biased, self.bias)
        if self.banned is not None:
            flat.index_fill_(0, self.banned, -torch.inf)


def _flatten(lists: Sequence[tuple[int, IntArray]], vocab: VocabSlice, device: torch.device) -> torch.Tensor | None:
    parts = [place * vocab.width + vocab.columns_of(ids.astype(np.int64)) for place, ids in lists]
    return upload(np.concatenate(parts), device) if parts else None


def collect_edits(
    samplings: Sequence[RowSampling | None], is_short: Sequence[bool], vocab: VocabSlice, device: torch.device
) -> TokenEdits | None:
    """Edits of ``vocab``'s ids in the edited rows; ``is_short`` marks the rows below their ``min_tokens``."""
    restricted, biased, banned, bias = [], [], [], []
    for place, (sampling, short) in enumerate(zip(samplings, is_short, strict=True)):
        if sampling is None:
            continue
        if len(sampling.allowed_token_ids):
            restricted.append((place, sampling.allowed_token_ids))
        if len(sampling.bias_token_ids):
            biased.append((place, sampling.bias_token_ids))
            bias.append(sampling.bias_values[vocab.holds(sampling.bias_token_ids)].astype(np.float32))
        if short:
            banned.append((place, sampling.stop_token_ids))
    if not (restricted or biased or banned):
        return None
    places = np.array([place for place, _ in restricted], dtype=np.int64)
    return TokenEdits(
        restricted=upload(places, device) if restricted else None,
        allowed=_flatten(restricted, vocab, device),
        biased=_flatten(biased, vocab, device),
        bias=upload(np.concatenate(bias), device) if bias else None,
        banned=_flatten(banned, vocab, device),
    )


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
    """Which of this rank's tokens each row has seen; allocated when the first penalised request arrives::

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
        """Count ``token_ids`` (m,) for ``rows`` (m,) int64, one each; with ``counted`` (m,) bool, only where true."""
        output_counts, _ = self._tensors()
        columns = token_ids - self._vocab.first
        is_mine = (columns >= 0) & (columns < self._shape[1])
        if counted is not None:
            is_mine &= counted
        flat = rows * self._shape[1] + columns.mul_(is_mine)
        output_counts.view(-1).index_add_(0, flat, is_mine.to(torch.int32))

    def mirror(self, draft_rows: IntArray, rows: IntArray, tokens: IntArray) -> None:
        """Give each of ``draft_rows`` (n,) the counts of its row in ``rows`` (n,), grouped, and count the draft
        ``tokens`` (n,) of that row up to its own."""
        targets, sources = upload_all([draft_rows.astype(np.int64), rows.astype(np.int64)], self._device)
        for counts in self._tensors():
            counts.index_copy_(0, targets, counts.index_select(0, sources))
        seen = np.tril(rows[:, None] == rows)
        places, draft_tokens = np.nonzero(seen)
        pairs = [draft_rows[places].astype(np.int64), tokens[draft_tokens].astype(np.int64)]
        self.record(*upload_all(pairs, self._device))

    def apply(self, logits: torch.Tensor, penalised: PenalisedRows) -> None:
        """Penalise rows of ``logits`` (e, width) float32 in place.

        Repetition over prompt and output as in transformers (CTRL, Keskar et al. 2019): positive logits are divided,
        negative ones multiplied.  Then frequency and presence over the output, as in OpenAI's API.
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
