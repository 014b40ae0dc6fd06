"""What a step's batch looks like apart from how far each row has come: equal from one decode step to the next.

With rows 7 and 2 decoding and a chunk of 3 tokens of row 5::

    rows          7  2  5           request   0  1  2
    query_lens    1  1  3
    query_start   0  1  2  5
    token_rows    7  2  5  5  5     token     0  1  2  3  4
    offsets       0  0  0  1  2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.layers.upload import upload
from tp_engine.plan import BoolArray, IntArray, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """B requests of N tokens in batch order, of which n are sampled.

    On the host: ``rows``, ``query_lens`` (B,); ``token_rows`` (N,) int64; ``offsets`` (N,), a token's place in its
    request's chunk; ``samples`` (B,), who is sampled; ``sampled_rows`` (n,).  On the device: ``device_rows`` (B,)
    int64, ``query_start`` (B + 1,) int32, ``logit_index`` (n,) int64, the last token of each sampled request.
    """

    num_decodes: int
    rows: IntArray
    query_lens: IntArray
    token_rows: npt.NDArray[np.int64]
    offsets: IntArray
    samples: BoolArray
    sampled_rows: IntArray
    device_rows: torch.Tensor
    query_start: torch.Tensor
    logit_index: torch.Tensor

    @property
    def is_decode_only(self) -> bool:
        """Whether every request has one token and is sampled."""
        return self.num_decodes == len(self.rows)

    @property
    def wanted(self) -> torch.Tensor | None:
        """The tokens (n,) int64 whose hidden states somebody reads; None: all, in order.

        In a step that samples nothing it is the first: an empty batch would be a case of its own everywhere.
        """
        if self.is_decode_only:
            return None
        return self.logit_index if len(self.logit_index) else self.query_start[:1].to(torch.int64)

    def positions(self, computed: IntArray) -> IntArray:
        """Positions (N,) of the tokens of requests that have ``computed`` (B,) tokens."""
        return computed if self.is_decode_only else np.repeat(computed, self.query_lens) + self.offsets


def make_layout(plan: StepPlan, device: torch.device) -> BatchLayout:
    """The layout of ``plan``: its decodes, then its prefills."""
    num_decodes = len(plan.decode_rows)
    rows = np.concatenate((plan.decode_rows, plan.prefill_rows))
    query_lens = np.concatenate((np.ones(num_decodes, dtype=np.int32), plan.prefill_tokens))
    samples = np.concatenate((np.ones(num_decodes, dtype=np.bool_), plan.prefill_samples))
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    offsets = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1], query_lens)
    return BatchLayout(
        num_decodes=num_decodes,
        rows=rows,
        query_lens=query_lens,
        token_rows=np.repeat(rows, query_lens).astype(np.int64),
        offsets=offsets,
        samples=samples,
        sampled_rows=rows[samples],
        device_rows=upload(rows.astype(np.int64), device),
        query_start=upload(query_start, device),
        logit_index=upload(query_start[1:][samples].astype(np.int64) - 1, device),
    )
