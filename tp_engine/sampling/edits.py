"""allowed_token_ids, logit_bias and min_tokens: ragged lists of token ids, flattened once per set of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray, RowSampling


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
    """Edits of the edited rows in order: their token lists, and whether they are still short of ``min_tokens``.

    Only those of ``vocab``'s ids.
    """
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
