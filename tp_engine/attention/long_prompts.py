"""Long prompts that begin in a step, through PyTorch's cuDNN attention; all else through another backend.

::

    step      | decodes | chunk |   long prompt   | prompt |   long prompt   |
    cuDNN                       |   and padding   |        |   and padding   |    one call each
    rest      | decodes | chunk |                 | prompt |

A long prompt begins in this step, so its queries are as many as its keys: cuDNN's causal attention, as PyTorch offers
it, has no other form.  Keys and values are gathered from the cache, where head preparation may have put them already.

cuDNN makes a plan for each length it has not met, which takes long.  So a prompt is padded to one of four lengths from
each power of two to the next, and ``first_lengths`` has them for the first steps.  Padding repeats the first key and
value: no query of the prompt sees them, but NaN, which unwritten memory may hold, would pass through the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.fresh import attend_causally
from tp_engine.attention.gathering import RowReader
from tp_engine.attention.unprepared import PreparesHeads
from tp_engine.env import long_prompts_by
from tp_engine.errors import ConfigError
from tp_engine.kernels.attention.heads import UnpreparedHeads
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op
from tp_engine.units import round_up

LEAST_TOKENS = 1024
MAX_HEAD_DIM = 128
HEAD_DIM_MULTIPLE = 8
MIN_CAPABILITY = (8, 0)


class _Prompt(NamedTuple):
    """The step's ``request`` (its place in the batch), whose queries are the tokens ``tokens``."""

    request: int
    tokens: slice

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return int(self.tokens.stop - self.tokens.start)


class LongPromptsBackend(PreparesHeads):
    """Gives prompts that begin in a step with at least ``least_tokens`` to ``attend``, and all else to other backends.

    ``make`` makes these: one for the rest of such a step, one for whole steps, and for layers that cap their scores,
    or have sinks, or a window shorter than a prompt of the step.  ``attend`` is called with queries (n, heads,
    head_dim), keys and values (n, KV heads, head_dim) and the scale, and returns (n, heads, head_dim).
    """

    def __init__(
        self,
        make: Callable[[], AttentionBackend],
        attend: Callable[[torch.Tensor, KeyValue, float], torch.Tensor] | None = None,
        *,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self._whole, self._rest = make(), make()
        self.name = self._whole.name
        self.can_capture_decodes = self._whole.can_capture_decodes
        self.can_capture_prompts = self._whole.can_capture_prompts
        self._attend, self._least_tokens = attend or attend_by_cudnn, least_tokens
        self._reader = RowReader()
        self._prompts: list[_Prompt] = []
        self._between: list[slice] = []
        self._rest_step: AttentionMetadata | None = None
        self._places: dict[tuple[int, int, int], torch.Tensor] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Find the step's long prompts; see ``AttentionBackend``.  Recorded steps may be padded, and have none."""
        self._whole.prepare(metadata)
        self._prompts, self._between, self._rest_step, self._places = [], [], None, {}
        if metadata.is_padded:
            return
        lengths = metadata.host_query_lens
        is_long = (lengths == metadata.host_seq_lens) & (lengths >= self._least_tokens)
        is_long[: metadata.num_decodes] = False
        if not is_long.any():
            return
        ends = np.cumsum(lengths)
        self._prompts = [
            _Prompt(request, slice(int(ends[request] - lengths[request]), int(ends[request])))
            for request in np.flatnonzero(is_long).tolist()
        ]
        self._between = list(_between([prompt.tokens for prompt in self._prompts], int(ends[-1])))
        if self._between:
            self._rest_step = _without(metadata, [prompt.request for prompt in self._prompts])
            self._rest.prepare(self._rest_step)

    def forward(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``."""
        if not self._takes(shape):
            return self._whole.forward(query, new, kv, metadata, shape)
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for prompt in self._prompts:
            out[prompt.tokens] = self._attend_prompt(prompt, query[prompt.tokens], kv, metadata, shape)
        if self._rest_step is not None:
            queries = _joined([query[tokens] for tokens in self._between])
            attended = self._rest.forward(queries, None, kv, self._rest_step, shape)
            start = 0
            for tokens in self._between:
                end = start + tokens.stop - tokens.start
                out[tokens], start = attended[start:end], end
        return out

    def attend_unprepared(
        self, new: UnpreparedHeads, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor | None:
        """Steps of decodes alone, which have no prompts; see ``PreparesHeads``."""
        if self._prompts or not isinstance(self._whole, PreparesHeads):
            return None
        return self._whole.attend_unprepared(new, kv, metadata, shape)

    def _takes(self, shape: AttentionShape) -> bool:
        """Whether the step has long prompts, and this layer shows each query all keys before it, by a plain softmax."""
        if not self._prompts or shape.softcap is not None or shape.sinks is not None or shape.value_dim is not None:
            return False
        return shape.sliding_window is None or shape.sliding_window >= max(one.num_tokens for one in self._prompts)

    def _attend_prompt(
        self, prompt: _Prompt, query: torch.Tensor, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """``query`` (n, heads, head_dim) of one prompt over its own keys."""
        num_tokens = len(query)
        places = self._places_of(prompt, kv, metadata)
        new = KeyValue(*(self._reader.read(kv, part, places).to(query.dtype) for part in range(2)))
        padded = F.pad(query, (0, 0, 0, 0, 0, len(places) - num_tokens))
        return self._attend(padded, new, shape.scale)[:num_tokens]

    def _places_of(self, prompt: _Prompt, kv: LayerKv, metadata: AttentionMetadata) -> torch.Tensor:
        """Where the prompt's keys lie, as ``RowReader`` takes it, padded; the same in all layers of a kind."""
        block_size = kv.cache.shape[2]
        rows_per_block = kv.rows_per_block if kv.scales is None else block_size
        found = self._places.get((prompt.request, block_size, rows_per_block))
        if found is None:
            num_blocks = -(-prompt.num_tokens // block_size)
            starts = metadata.block_table[prompt.request, :num_blocks, None].long() * rows_per_block
            rows = (starts + torch.arange(block_size, device=starts.device)).flatten()[: prompt.num_tokens]
            padding = rows[:1].expand(padded_length(prompt.num_tokens) - prompt.num_tokens)
            found = self._places[prompt.request, block_size, rows_per_block] = torch.cat((rows, padding))
        return found


def attend_by_cudnn(query: torch.Tensor, new: KeyValue, scale: float) -> torch.Tensor:
    """``attend_causally`` by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_causally(query, new, scale)


def padded_length(num_tokens: int) -> int:
    """``num_tokens``, at least 4, rounded up to a multiple of a quarter of the power of two at or below it."""
    return round_up(num_tokens, 1 << (num_tokens.bit_length() - 3))


def first_lengths(longest: int) -> list[int]:
    """One prompt for each padded length, ``longest`` tokens at most; none where cuDNN is not asked for."""
    if long_prompts_by() != "cudnn":
        return []
    lengths, length = [], LEAST_TOKENS
    while length < longest:
        lengths.append(length)
        length = padded_length(length + 1)
    return [*lengths, longest] if longest >= LEAST_TOKENS else []


def _between(prompts: list[slice], num_tokens: int) -> Iterator[slice]:
    """The pieces of ``num_tokens`` between ``prompts``, before the first and behind the last one, if not empty."""
    bounds = [0, *(bound for tokens in prompts for bound in (tokens.start, tokens.stop)), num_tokens]
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        if start < end:
            yield slice(start, end)


def _without(metadata: AttentionMetadata, requests: list[int]) -> AttentionMetadata:
    """The step without these ``requests`` and their tokens, made of what is on the device: nothing is uploaded."""
    kept = list(_between([slice(request, request + 1) for request in requests], metadata.num_requests))
    lengths, host_lens = metadata.query_start.diff(), metadata.host_query_lens
    ends = _joined([lengths[rows] for rows in kept]).cumsum(0, dtype=torch.int32)
    starts = np.concatenate(([0], np.cumsum(host_lens)))
    return AttentionMetadata(
        num_decodes=metadata.num_decodes,
        slot_mapping=_joined([metadata.slot_mapping[starts[rows.start] : starts[rows.stop]] for rows in kept]),
        block_table=_joined([metadata.block_table[rows] for rows in kept]),
        seq_lens=_joined([metadata.seq_lens[rows] for rows in kept]),
        query_start=F.pad(ends, (1, 0)),
        host_query_lens=np.concatenate([host_lens[rows] for rows in kept]),
        host_seq_lens=np.concatenate([metadata.host_seq_lens[rows] for rows in kept]),
        is_padded=False,
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """``parts``, one behind the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def wants_long_prompts(needs: AttentionNeeds) -> bool:
    """Whether cuDNN is asked for; ``ConfigError`` if it can not attend here."""
    if long_prompts_by() != "cudnn":
        return False
    obstacle = why_not(needs)
    if obstacle is not None:
        raise ConfigError(f"TP_ENGINE_LONG_PROMPTS is cudnn: {obstacle}; unset it")
    return True


def why_not(needs: AttentionNeeds) -> str | None:
    """Why cuDNN can not attend to long prompts; None if it can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {needs.dtype}"
    if needs.has_latents:
        return "the model has latent attention, which has calls of its own for long prompts"
    if needs.is_invariant:
        return "with tp_invariant a prompt's result must not depend on how much of it is cached"
    odd = [size for size in needs.head_dims if size > MAX_HEAD_DIM or size % HEAD_DIM_MULTIPLE]
    if odd:
        return f"head_dim is {odd[0]}; it takes multiples of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM}"
    return needs.why_too_old(MIN_CAPABILITY)
