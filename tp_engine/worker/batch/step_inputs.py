"""What one forward pass is given: its inputs, the layout of its batch, and its tokens' slots.

The layout is all that does not depend on how far each row has come, so it is equal from one decode step to the next.
With rows 7 and 2 decoding and a chunk of 3 tokens of row 5::

    rows          7  2  5           request         0  1  2
    query_lens    1  1  3
    query_start   0  1  2  5
    token_rows    5  5  5           prefill token   0  1  2
    offsets       0  1  2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.layers.upload import upload_all
from tp_engine.plan import PAD_SLOT, BoolArray, IntArray, StepPlan

SlotArray: TypeAlias = npt.NDArray[np.int64]
AnyIntArray: TypeAlias = npt.NDArray[np.integer[Any]]

MAX_SLOT = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one forward pass over N tokens; n of them are followed by a sampled token.

    On the device: ``input_ids`` (N,) int32, ``positions`` (N,) int64; ``prefill_places`` (p,) int64, where the new ids
    of sampled prefills go in the flattened token table, None if no prefill is sampled.  On the host:
    ``sampled_positions`` (n,), the new tokens' positions.  ``places`` (N,) int64 are those of the prefills' tokens in
    that table, after arbitrary ones for the decodes; None if there are only decodes.  ``attention`` has one entry per
    group of layers.  ``rotary_positions`` (N,) int64 are those of a prompt without images.
    """

    layout: BatchLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionMetadata, ...]
    sampled_positions: IntArray
    prefill_places: torch.Tensor | None = None
    places: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None

    @property
    def rotary_positions(self) -> torch.Tensor:
        """The rotary positions (N,) int64."""
        return self.positions if self.rope_positions is None else self.rope_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """B requests of N tokens in batch order, of which n are sampled; the first ``num_decodes`` are decodes.

    On the host: ``rows``, ``query_lens`` (B,); ``samples`` (B,), which are sampled; ``sampled_rows`` (n,).  On the
    device: ``query_start`` (B + 1,) int32, ``logit_index`` (n,) int64, the last token of each sampled request.

    Of the prefills alone, P of them with T tokens: ``token_rows`` (T,) int64 and ``offsets`` (T,), a token's place in
    its request's chunk, on the host; ``prefill_index`` (P,) int64, their rows, on the device.
    """

    num_decodes: int
    rows: IntArray
    query_lens: IntArray
    samples: BoolArray
    sampled_rows: IntArray
    query_start: torch.Tensor
    logit_index: torch.Tensor
    token_rows: npt.NDArray[np.int64]
    offsets: IntArray
    prefill_index: torch.Tensor

    @property
    def is_decode_only(self) -> bool:
        """Whether every request has one token and is sampled."""
        return self.num_decodes == len(self.rows)

    @property
    def wanted(self) -> torch.Tensor | None:
        """The tokens (n,) int64 whose hidden states are read; None: all, in order.

        If the step samples nothing, it is the first token: no layer then has to support an empty batch.
        """
        if self.is_decode_only:
            return None
        return self.logit_index if len(self.logit_index) else self.query_start[:1].to(torch.int64)

    @property
    def prefill_rows(self) -> IntArray:
        """The rows (P,) of the prefills."""
        return self.rows[self.num_decodes :]

    @property
    def prefill_tokens(self) -> IntArray:
        """The prefills' numbers of tokens (P,)."""
        return self.query_lens[self.num_decodes :]


def make_layout(plan: StepPlan, device: torch.device) -> BatchLayout:
    """Return the layout of ``plan``: its decodes, then its prefills."""
    num_decodes, chunks = len(plan.decode_rows), plan.prefill_tokens
    num_requests = num_decodes + len(chunks)
    query_lens, samples = np.empty(num_requests, dtype=np.int32), np.empty(num_requests, dtype=np.bool_)
    query_lens[:num_decodes], query_lens[num_decodes:] = 1, chunks
    samples[:num_decodes], samples[num_decodes:] = True, plan.prefill_samples
    query_start = np.zeros(num_requests + 1, dtype=np.int32)
    query_lens.cumsum(out=query_start[1:])
    prefill_rows = plan.prefill_rows.astype(np.int64)
    rows = np.concatenate((plan.decode_rows, plan.prefill_rows))
    starts, num_tokens = query_start[num_decodes:-1], int(query_start[-1])
    logit_index = query_start[1:][samples].astype(np.int64) - 1
    on_device = upload_all((query_start, logit_index, prefill_rows), device)
    return BatchLayout(
        num_decodes=num_decodes,
        rows=rows,
        query_lens=query_lens,
        samples=samples,
        sampled_rows=rows[samples],
        query_start=on_device[0],
        logit_index=on_device[1],
        token_rows=prefill_rows.repeat(chunks),
        offsets=np.arange(num_decodes, num_tokens, dtype=np.int32) - starts.repeat(chunks),
        prefill_index=on_device[2],
    )


def slots_for(
    block_tables: IntArray, row_index_per_token: AnyIntArray, positions: AnyIntArray, block_size: int
) -> SlotArray:
    """Slots (..., N) int64 of N tokens of many rows: where their K/V lies in the paged cache.

    A slot is ``block_id * block_size + offset``.  With block_size 4 and the block table [5, 2]::

        position    0  1  2  3 |  4  5  6  7
        block             5    |        2
        slot       20 21 22 23 |  8  9 10 11

    ``block_tables`` (..., rows, blocks per row), such as one for each group of layers; token i is at ``positions[i]``
    (N,) of row ``row_index_per_token[i]`` (N,).  A negative position is padding and gets ``PAD_SLOT``.  Every slot fits
    in 32 bits, which kernels rely on.
    """
    blocks = block_tables[..., row_index_per_token, positions // block_size].astype(np.int64)
    slots: SlotArray = blocks * block_size + positions % block_size
    if not slots.size:
        return slots
    padding = positions < 0
    if padding.any():
        slots[..., padding] = 0
    assert slots.max() <= MAX_SLOT, f"slot {slots.max()} does not fit in 32 bits"
    assert slots.min() >= 0, "a token lies in a block that its table does not hold"
    slots[..., padding] = PAD_SLOT
    return slots
