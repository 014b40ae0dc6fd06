"""Sampling by kernels, with the same launches for any rows, so that a captured graph can hold them.

Nothing here depends on a host value that changes from step to step: rows and positions are read on the device,
parameters from the rows' tables.  The host only chooses the *kind* of a step, and each kind has its own launches:

| rows | one rank | several ranks |
| --- | --- | --- |
| greedy, temperature | best_tokens | the same, its keys exchanged |
| with penalties (``penalised``) | the same launch reads the counts | the same |
| min_p without top_k and top_p (``min_p``) | largest logit first | the same, exchanged first |
| top_p without top_k (NUCLEUS) | draw_nucleus, from the best tokens | fronts, then weights, exchanged \
(``nucleus_ranks_triton``) |
| top_k up to MAX_RANKED (RANKED; with NUCLEUS: BOTH) | draw_nucleus, draw_ranked | top_keys, exchanged with the \
others' keys, draw_of_shares |
| a larger top_k (RANKED; several ranks: GATHERED) | draw_nucleus, draw_ranked | the same from all logits, exchanged |

``kind_of`` is None for steps that this sampler does not sample: those with rows that have token lists,
log-probabilities, tokens still banned by min_tokens, or penalties beside filters.  ``Sampler`` masks the logits of
rows with masks.
"""

import enum
from typing import Any, NamedTuple

import numpy as np
import torch

from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.candidates import DEFAULTS, Choices, Wanted
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.plan import IntArray
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.ranked_shares import NAME, choose_draw, shape_of
from tp_engine.sampling.ranking import LOWEST_KEY
from tp_engine.sampling.state import SamplingState
from tp_engine.sampling.vocab_parallel import exchange

MAX_RANKED = 64  # a row's candidates in an exchange, and the length of a nucleus' front
SHARE_BYTES = tuple(num_keys * torch.int64.itemsize for num_keys in (1, 1 + MAX_RANKED))
"""Bytes that a rank sends the others for each row, in a step of a recorded kind."""


class Filters(enum.IntEnum):
    """How the rows of a step that have top_k or top_p are drawn; see the module's table."""

    NONE = 0
    NUCLEUS = 1
    RANKED = 2
    BOTH = 3
    GATHERED = 4


def sampler_kernels(world_size: int, device_type: str) -> list[Wanted]:
    """Return the operations with candidates that sampling runs."""
    return [(NAME, shape_of(world_size, MAX_RANKED))] if world_size > 1 and device_type == "cuda" else []


class SamplerVariant(NamedTuple):
    """The kind of a step: what it needs beside the first launch."""

    filters: Filters = Filters.NONE
    penalised: bool = False
    min_p: bool = False


class DeviceSampler:
    """Samples the rows of ``state``, which has tables, together with the other ranks if there are any."""

    def __init__(self, state: SamplingState, communicator: Communicator, choices: Choices = DEFAULTS) -> None:
        from tp_engine.kernels.sampling import nucleus_ranks_triton as of_ranks
        from tp_engine.kernels.sampling.best_triton import best_tokens_triton
        from tp_engine.kernels.sampling.candidates_triton import draw_ranked_triton
        from tp_engine.kernels.sampling.filter_triton import top_keys_triton
        from tp_engine.kernels.sampling.nucleus_triton import draw_nucleus_triton

        assert of_ranks.WIDTH == MAX_RANKED, "one share has the candidates of either kind of row"
        assert state.tables is not None, "kernels read the state's tables"
        self._tables: SamplingTables = state.tables
        self._state = state
        self._communicator = communicator
        self._best_tokens, self._top_keys = best_tokens_triton, top_keys_triton
        self._draw_nucleus, self._draw_ranked = draw_nucleus_triton, draw_ranked_triton
        self._front_share, self._weigh_fronts = of_ranks.front_share_triton, of_ranks.weigh_fronts_triton
        self._choose_of_fronts = of_ranks.choose_of_fronts_triton
        world_size, device = communicator.info.world_size, state.tables.floats.device
        self._draw_of_shares = choose_draw(device, world_size, MAX_RANKED, choices)
        self._is_alone = world_size == 1

    @property
    def kinds(self) -> tuple[SamplerVariant, ...]:
        """The kinds whose steps are recorded."""
        kinds = tuple(SamplerVariant(filters) for filters in (Filters.NONE, Filters.NUCLEUS, Filters.RANKED))
        return kinds if self._is_alone else (*kinds, SamplerVariant(Filters.BOTH))

    @property
    def advancing(self) -> tuple[SamplerVariant, ...]:
        """Those of ``kinds`` whose only launch can also end the decode step of its rows."""
        return (SamplerVariant(),) if self._is_alone else ()

    def kind_of(self, rows: IntArray, positions: IntArray) -> SamplerVariant | None:
        """The kind of a step that samples ``rows`` (n,) at ``positions`` (n,); None if this sampler does not."""
        state = self._state
        is_short = positions - state.num_prompt_tokens[rows] < state.min_tokens[rows]
        if (state.has_lists[rows] | (state.num_logprobs[rows] >= 0) | is_short).any():
            return None
        draws, penalised = state.temperature[rows] > 0.0, state.is_penalised[rows]
        ranked = draws & (state.top_k[rows] < state.vocab_size)
        nucleus = draws & ~ranked & (state.top_p[rows] < 1.0)
        min_p = draws & ~ranked & ~nucleus & (state.log_min_p[rows] > -np.inf)
        if (penalised & (ranked | nucleus | min_p)).any():
            return None
        filters = Filters.NUCLEUS if nucleus.any() else Filters.NONE
        if ranked.any():
            if self._is_alone:
                filters = Filters.RANKED
            elif (ranked & (state.top_k[rows] > MAX_RANKED)).any():
                filters = Filters.GATHERED
            else:
                filters = Filters.RANKED if filters is Filters.NONE else Filters.BOTH
        return SamplerVariant(filters, penalised=bool(penalised.any()), min_p=bool(min_p.any()))

    def sample(
        self,
        kind: SamplerVariant,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        advanced: RowTables | None = None,
    ) -> torch.Tensor:
        """Token ids (n,) int32, the same on every rank.  The host reads no value, so it can be captured.

        ``logits`` (n, width) are this rank's slice.  On the device: ``rows`` (n,) int32, -1 for padding, which gets any
        token, and the ``positions`` (n,) int64 of their last tokens.  A collective if there are several ranks.
        ``advanced``, for kinds of ``advancing``, are the tables that receive the tokens (``advance_decodes``).
        """
        assert advanced is None or kind in self.advancing, kind
        held = logits[:, : self._state.vocab.num_ids]
        options: dict[str, Any] = {
            "counts": self._state.penalties.tables if kind.penalised else None,
            "maxima": self._maxima(held) if kind.min_p else None,
            "ranked_below": self._state.vocab_size if kind.filters >= Filters.RANKED else None,
            "advanced": advanced,
        }
        if self._is_alone:
            tokens = self._sample_alone(kind.filters, held, rows, positions, options)
        else:
            best = self._best_share(held, rows, positions, options)
            if kind.filters is Filters.NONE:
                tokens = vocab_parallel.merge_best(*exchange(self._communicator, [best]))
            elif kind.filters is Filters.GATHERED:
                tokens = self._sample_gathered(best, logits, rows, positions)
            else:
                tokens = self._sample_candidates(kind.filters, best, held, rows, positions)
        if kind.penalised:
            self._record(rows, tokens)
        return tokens

    def _sample_alone(
        self,
        filters: Filters,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        draws = filters is not Filters.NONE
        best = self._best_tokens(logits, rows, positions, self._tables, first_id=0, finds_maxima=draws, **options)
        if draws:
            self._draw_nucleus(logits, rows, positions, self._tables, best)
        if filters is Filters.RANKED:
            self._draw_ranked(logits, rows, positions, self._tables, best.token_ids)
        tokens: torch.Tensor = best.token_ids
        return tokens

    def _sample_gathered(
        self, best: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Filtered rows are drawn as on a single rank, from all ranks' logits; the others get their ``best`` token."""
        best_of_ranks, slices = exchange(self._communicator, [best, logits])
        whole = vocab_parallel.whole_logits(slices, self._state.vocab_size)
        options = {"ranked_below": self._state.vocab_size}
        drawn = self._sample_alone(Filters.RANKED, whole, rows, positions, options)
        known = rows.clamp(min=0)
        temperature, top_p = self._tables.floats.index_select(0, known).unbind(1)[:2]
        has_top_k = self._tables.top_k.index_select(0, known) < self._state.vocab_size
        is_filtered = (temperature > 0.0) & (has_top_k | (top_p < 1.0))
        return torch.where(is_filtered, drawn, vocab_parallel.merge_best(best_of_ranks))

    def _sample_candidates(
        self,
        filters: Filters,
        best: torch.Tensor,
        held: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Rows with top_k or top_p are drawn from the ranks' candidates; the others get their ``best`` token."""
        vocab = self._state.vocab
        has_ranked, has_nucleus = filters is not Filters.NUCLEUS, filters is not Filters.RANKED
        step = (held, rows, positions, self._tables)
        share = self._ranked_share(held, rows) if has_ranked else self._no_keys(held, MAX_RANKED)
        if has_nucleus:
            self._front_share(share, *step, first_id=vocab.first, vocab_size=vocab.vocab_size)
        best_of_ranks, shares = exchange(self._communicator, [best, share])
        tokens = vocab_parallel.merge_best(best_of_ranks)
        if has_ranked:
            self._draw_of_shares(tokens, shares, rows, positions, self._tables, vocab_size=vocab.vocab_size)
        if has_nucleus:
            front, own = self._weigh_fronts(shares, *step, first_id=vocab.first, vocab_size=vocab.vocab_size)
            (sums,) = exchange(self._communicator, [own])
            self._choose_of_fronts(tokens, front, sums, rows, self._tables, vocab_size=vocab.vocab_size)
        return tokens

    def _maxima(self, held: torch.Tensor) -> torch.Tensor:
        (stack,) = exchange(self._communicator, [vocab_parallel.maximum_share(held)])
        return vocab_parallel.decide_maximum(stack)[:, 0]

    def _best_share(
        self, held: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        if held.shape[1] == 0:
            return self._no_keys(held, 1)
        first_id = self._state.vocab.first
        best = self._best_tokens(held, rows, positions, self._tables, first_id=first_id, **options)
        keys: torch.Tensor = best.keys[:, None]
        return keys

    def _ranked_share(self, held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if held.shape[1] == 0:
            return self._no_keys(held, MAX_RANKED)
        return self._top_keys(held, rows, self._tables, first_id=self._state.vocab.first, width=MAX_RANKED)

    @staticmethod
    def _no_keys(held: torch.Tensor, width: int) -> torch.Tensor:
        return torch.full((held.shape[0], width), LOWEST_KEY, dtype=torch.int64, device=held.device)

    def _record(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        known = rows.clamp(min=0)
        _, _, _, repetition, frequency, presence = self._tables.floats.index_select(0, known).unbind(1)
        is_penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
        self._state.penalties.record(known, tokens, is_penalised & (rows >= 0))
