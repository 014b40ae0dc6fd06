"""Masks of one step: which tokens a grammar allows in some of its rows.

::

    plan    rows 7 and 2, each one bit per token id           | word 0 | word 1 | ...
    rank    the bytes of its slice, unpacked on the device      first // 8 ... (first + num_ids - 1) // 8
    logits  -inf where the bit is not set, before anything else is done with them; log-probabilities stay raw

A slice begins at a multiple of 16 tokens, so it is a range of whole bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.upload import upload
from tp_engine.plan import MASK_TOKENS, NO_IDS, NO_MASKS, IntArray
from tp_engine.sampling.chunks import row_chunks

_BITS = 8


class StepMasks:
    """The masks of the step that is about to be sampled, for this rank's slice of the vocabulary."""

    def __init__(self, max_num_seqs: int, vocab: VocabSlice, device: torch.device) -> None:
        assert vocab.first % _BITS == 0, f"a slice that begins at token {vocab.first}"
        self._vocab = vocab
        self._device = device
        self._rows = NO_IDS
        self._masks = NO_MASKS
        self._place = np.full(max_num_seqs, -1, dtype=np.int64)  # of a row among the masks

    def set(self, rows: IntArray, masks: IntArray) -> None:
        """The next step's masks (m, words) of ``rows`` (m,), and no others: those of the last step are forgotten."""
        if not (len(rows) or len(self._rows)):
            return
        assert len(rows) == 0 or masks.shape[1] * MASK_TOKENS >= self._vocab.vocab_size, f"masks {masks.shape}"
        self._place[self._rows] = -1
        self._place[rows] = np.arange(len(rows))
        self._rows, self._masks = rows, masks

    def any_of(self, rows: IntArray) -> bool:
        """Whether any of ``rows`` (n,) is masked in this step."""
        return bool(len(self._rows)) and bool((self._place[rows] >= 0).any())

    def apply(self, logits: torch.Tensor, rows: IntArray, *, in_place: bool) -> torch.Tensor:
        """The logits (n, width) of ``rows`` (n,) with -inf for what is not allowed; a copy unless ``in_place``."""
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
