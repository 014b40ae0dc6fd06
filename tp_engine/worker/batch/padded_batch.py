"""Steps with prompts at fixed sizes: which sizes there are, what the host sends of a step, where its inputs are.

A step of size (D, T) has room for D decodes and for up to ``MAX_CHUNKS`` chunks of prompts with T tokens in all
(``kernels/steps/padded_steps.py``).  Its launches depend on D and T alone, so a CUDA graph may hold it.
"""

import bisect
from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.ops import op
from tp_engine.kernels.steps.decode_inputs import PAD_ROW, RowTables
from tp_engine.kernels.steps.padded_steps import PaddedInputs, PaddedRequests
from tp_engine.layers.upload import upload_into
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import IntArray, StepPlan
from tp_engine.worker.graphs.captured_steps import PlacedInputs, StepShape

MAX_CHUNKS = 16  # a power of two, for the kernel that finds the chunk of each token
# Up to here a step takes as long as reading the weights, whatever its number of tokens.
_FREE_TOKENS = 128
_MAX_PADDING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Room for ``decodes`` and for ``tokens`` of prompts."""

    decodes: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.decodes + self.tokens

    @property
    def num_requests(self) -> int:
        """Requests of the step, padding included; as many tokens can be sampled."""
        return self.decodes + MAX_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Each of ``decodes`` with each of ``tokens``, both rising."""

    decodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def largest_first(self) -> list[StepSize]:
        """All sizes; for each number of decodes the numbers of tokens, the largest first."""
        return [
            StepSize(decodes=decodes, tokens=tokens)
            for decodes in reversed(self.decodes)
            for tokens in reversed(self.tokens)
        ]

    def size_for(self, plan: StepPlan) -> StepSize | None:
        """Return the smallest size that holds the step ``plan``, which has prompts.

        None if none does, or if padding would double the work.
        """
        num_decodes, num_tokens = len(plan.decode_rows), plan.num_tokens
        num_prompt_tokens = num_tokens - num_decodes
        if num_decodes > self.decodes[-1] or not 0 < num_prompt_tokens <= self.tokens[-1]:
            return None
        if len(plan.prefill_rows) > MAX_CHUNKS:
            return None
        size = StepSize(
            decodes=self.decodes[bisect.bisect_left(self.decodes, num_decodes)],
            tokens=self.tokens[bisect.bisect_left(self.tokens, num_prompt_tokens)],
        )
        return size if size.num_tokens <= max(_MAX_PADDING * num_tokens, _FREE_TOKENS) else None


class PaddedBatch(StepShape[StepSize]):
    """Prompts, mixed with decodes or alone, of ``sizes``: their inputs are at one place, at first all padding.

    The host's part of a step is one small upload.
    """

    def __init__(self, tables: RowTables, sizes: StepSizes) -> None:
        self._tables, self._sizes, self._device = tables, sizes, tables.token_ids.device
        self._prepare, self._advance = op("prepare_steps", self._device.type), op("advance_steps", self._device.type)
        room = sizes.largest_first[0]
        # One tensor, so that a step's requests are one upload: four rows of B, then ``query_start``.
        self._requests = torch.zeros(5 * room.num_requests + 1, dtype=torch.int32, device=self._device)
        self._inputs = PaddedInputs.allocate(room.num_tokens, room.num_requests, tables)
        self._nothing = torch.zeros(room.num_requests, dtype=torch.int32, device=self._device)

    def hidden_room(self, model: LanguageModel) -> torch.Tensor:
        """One room for all sizes: what follows the model depends on the number of decodes alone."""
        return torch.zeros((len(self._nothing), model.hidden_size), dtype=model.dtype, device=self._device)

    def size_for(self, plan: StepPlan) -> StepSize | None:
        """None too if padding would double the work."""
        return self._sizes.size_for(plan)

    def num_sampled(self, size: StepSize) -> int:
        return size.num_requests

    def set_step(self, plan: StepPlan, size: StepSize) -> None:
        packed = pack_requests(plan, size)
        upload_into(self._requests[: len(packed)], packed)

    def requests(self, num_decodes: int) -> PaddedRequests:
        """Return what ``set_step`` has said of a step with room for ``num_decodes``."""
        count = num_decodes + MAX_CHUNKS
        rows, wanted, sampled_rows, sampled_places = self._requests[: 4 * count].view(4, count).unbind()
        return PaddedRequests(
            num_decodes=num_decodes,
            rows=rows,
            wanted=wanted,
            sampled_rows=sampled_rows,
            sampled_places=sampled_places,
            query_start=self._requests[4 * count : 5 * count + 1],
        )

    def inputs(self, size: StepSize) -> PaddedInputs:
        """Return where the inputs of a step of ``size`` are."""
        return self._inputs.first(size.num_tokens, size.num_requests)

    def prepare(self, size: StepSize) -> PlacedInputs:
        """For the host, one chunk has all tokens of prompts."""
        requests, inputs = self.requests(size.decodes), self.inputs(size)
        self._prepare(self._tables, requests, inputs)
        query_lens: IntArray = np.zeros(size.num_requests, dtype=np.int32)
        query_lens[: size.decodes], query_lens[size.decodes] = 1, size.tokens
        attention = tuple(
            AttentionMetadata(
                num_decodes=size.decodes,
                slot_mapping=slot_mapping,
                block_table=block_table,
                seq_lens=inputs.seq_lens,
                query_start=requests.query_start,
                host_query_lens=query_lens,
                host_seq_lens=np.zeros(size.num_requests, dtype=np.int32),
                decode_rows=requests.rows[: size.decodes],
            )
            for slot_mapping, block_table in zip(inputs.slot_mapping.unbind(), inputs.block_table.unbind(), strict=True)
        )
        return PlacedInputs(
            input_ids=inputs.input_ids, positions=inputs.rotary_positions, wanted=requests.wanted, attention=attention
        )

    def sampled(self, size: StepSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of padding are arbitrary."""
        requests = self.requests(size.decodes)
        return requests.sampled_rows, self._inputs.positions.index_select(0, requests.wanted)

    def advance(self, size: StepSize, tokens: torch.Tensor | None) -> None:
        self._advance(self._tables, self.requests(size.decodes), self._nothing if tokens is None else tokens)


def pack_requests(plan: StepPlan, size: StepSize) -> IntArray:
    """Return the parts of ``PaddedRequests`` (5 B + 1,), one after the other, for ``plan`` padded to ``size``."""
    room, count = size.decodes, size.num_requests
    packed: IntArray = np.zeros(5 * count + 1, dtype=np.int32)
    rows, wanted, sampled_rows, sampled_places = packed[: 4 * count].reshape(4, count)
    starts = packed[4 * count :]
    num_decodes, samples = len(plan.decode_rows), plan.prefill_samples
    chunks = slice(room, room + len(plan.prefill_rows))
    rows.fill(PAD_ROW)
    rows[:num_decodes], rows[chunks] = plan.decode_rows, plan.prefill_rows
    starts[: room + 1] = np.arange(room + 1)
    ends = room + plan.prefill_tokens.cumsum()
    starts[room + 1 :] = ends[-1] if len(ends) else room
    starts[room + 1 : chunks.stop + 1] = ends
    sampled = plan.sampled_rows
    wanted[:num_decodes], wanted[num_decodes : len(sampled)] = np.arange(num_decodes), ends[samples] - 1
    sampled_rows.fill(PAD_ROW)
    sampled_rows[: len(sampled)] = sampled
    sampled_places.fill(-1)
    sampled_places[:num_decodes] = np.arange(num_decodes)
    sampled_places[chunks][samples] = np.arange(num_decodes, len(sampled))
    return packed
