"""The rows of a step in groups that are sampled by the same method; the host decides.

| rows | method |
| --- | --- |
| temperature 0 | GREEDY: argmax |
| no top_k, top_p 1 | ANY: noise over the vocabulary; min_p is a threshold |
| top_k up to MAX_CANDIDATES | RANKED: the largest top_k of the group, noise for candidates only |
| a larger top_k | SORTED: all tokens ranked |
| no top_k, top_p below 1 | NUCLEUS |

A row's group follows from its own parameters alone.  Groups hold while the same rows are sampled, no row is admitted or
released, and the same rows are below their ``min_tokens``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.layers.upload import upload
from tp_engine.plan import BoolArray, IntArray
from tp_engine.sampling.processors import PenalisedRows, PenaltyCounts, TokenEdits, collect_edits
from tp_engine.sampling.state import SamplingState

MAX_CANDIDATES = 1024

IndexArray = npt.NDArray[np.int64]


class SamplingMethod(enum.IntEnum):
    """How a row draws its token."""

    GREEDY = 0
    ANY = 1
    RANKED = 2
    SORTED = 3
    NUCLEUS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """m rows of a step that draw by the same method.

    ``members`` (m,) int64 are their places in the step.  They read the edited logits if ``edited``, else the step's;
    ``source`` (m,) int64 are their places in that matrix, None for all of its rows in order.  Parameters are (m, 1):
    ``temperature``, ``log_min_p`` float32, ``top_p`` float64, ``top_k`` int64.
    """

    method: SamplingMethod
    edited: bool
    members: torch.Tensor
    source: torch.Tensor | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    largest_top_k: int
    uses_min_p: bool

    def logits_of(
        self, logits: torch.Tensor, edited: torch.Tensor | None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the group (m, width): from ``logits`` (n, width) or ``edited`` (e, width)."""
        matrix = edited if self.edited else logits
        assert matrix is not None
        if self.source is None:
            return matrix if not start and stop is None else matrix[start:stop]
        return matrix.index_select(0, self.source[start:stop])

    def part(self, start: int, stop: int) -> RowGroup:
        """Rows ``start`` to ``stop`` of the group."""
        return self.select(slice(start, stop))

    def select(self, rows: slice | torch.Tensor) -> RowGroup:
        """Some rows of the group: a range, or places (int64)."""
        return replace(
            self,
            members=self.members[rows],
            source=None if self.source is None else self.source[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            log_min_p=self.log_min_p[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRows:
    """The scored rows of a step, in order: temperature 1 and no filters where a row is greedy.

    Row ``sources[i]`` of the edited logits is scored row ``targets[i]``.
    """

    group: RowGroup
    targets: torch.Tensor
    sources: torch.Tensor

    def logits_of(self, logits: torch.Tensor, edited: torch.Tensor | None) -> torch.Tensor:
        """A copy of the scored rows (s, width) float32 after edits and penalties, from ``logits`` (n, width) after the
        masks and ``edited`` (e, width)."""
        found = logits.index_select(0, self.group.members).to(torch.float32)
        if edited is not None:
            found.index_copy_(0, self.targets, edited.index_select(0, self.sources))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """A step's groups, and the places (int64, on the device) that need edits, penalties or log-probabilities.

    ``processed``: how the scored rows draw, if their log-probabilities come from processed logits.
    """

    groups: tuple[RowGroup, ...]
    edited: torch.Tensor | None
    edits: TokenEdits | None
    penalised: PenalisedRows | None
    penalised_members: torch.Tensor | None
    scored: torch.Tensor | None
    num_logprobs: int
    processed: ProcessedRows | None = None

    @property
    def draws(self) -> bool:
        """Whether any row needs noise."""
        return any(group.method is not SamplingMethod.GREEDY for group in self.groups)

    def edited_logits(self, logits: torch.Tensor, counts: PenaltyCounts) -> torch.Tensor | None:
        """A float32 copy (e, width) of the rows of ``logits`` (n, width) that need edits or penalties, after both; None
        if no row needs them.
        """
        if self.edited is None:
            return None
        edited = logits.index_select(0, self.edited).to(torch.float32)
        if self.edits is not None:
            self.edits.apply(edited)
        if self.penalised is not None:
            counts.apply(edited, self.penalised)
        return edited

    def scored_logits(
        self, raw: torch.Tensor, logits: torch.Tensor, edited: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The logits (s, width) of the rows that want log-probabilities, from those before (``raw``) and after the
        masks, both (n, width), and ``edited`` (e, width); None if no row wants any."""
        if self.processed is not None:
            return self.processed.logits_of(logits, edited)
        if self.scored is None or len(self.scored) == len(raw):
            return None if self.scored is None else raw
        return raw.index_select(0, self.scored)

    def record(self, token_ids: torch.Tensor, counts: PenaltyCounts) -> None:
        """Count the sampled ``token_ids`` (n,) of penalised rows."""
        if self.penalised is not None and self.penalised_members is not None:
            counts.record(self.penalised.rows, token_ids.index_select(0, self.penalised_members))


def group_rows(state: SamplingState, rows: IntArray, is_short: BoolArray) -> StepGroups:
    """Group the sampled ``rows`` (n,); ``is_short`` (n,) marks the rows below their ``min_tokens``."""
    is_edited = state.is_edited[rows] | is_short
    edited = np.flatnonzero(is_edited)
    place_in_source = np.where(is_edited, np.cumsum(is_edited), np.arange(1, len(rows) + 1)) - 1
    methods = _methods(state, rows)
    groups = []
    for method in SamplingMethod:
        for of_edited in (False, True):
            members = np.flatnonzero((methods == method) & (is_edited == of_edited))
            if len(members):
                whole = len(members) == (len(edited) if of_edited else len(rows))
                source = None if whole else upload(place_in_source[members], state.device)
                groups.append(_group(state, rows, members, method, of_edited, source))
    penalised = np.flatnonzero(state.is_penalised[rows])
    wanted = state.num_logprobs[rows]
    return StepGroups(
        groups=tuple(groups),
        edited=upload(edited, state.device) if len(edited) else None,
        edits=_edits(state, rows[edited], is_short[edited]),
        penalised=_penalised(state, rows[penalised], place_in_source[penalised]) if len(penalised) else None,
        penalised_members=upload(penalised, state.device) if len(penalised) else None,
        scored=upload(np.flatnonzero(wanted >= 0), state.device) if (wanted >= 0).any() else None,
        num_logprobs=int(wanted.max(initial=-1)),
        processed=_processed(state, rows, is_edited) if state.scores_processed and (wanted >= 0).any() else None,
    )


def _processed(state: SamplingState, rows: IntArray, is_edited: BoolArray) -> ProcessedRows:
    scored = np.flatnonzero(state.num_logprobs[rows] >= 0)
    group = _group(state, rows, scored, SamplingMethod.SORTED, False, None)
    greedy = upload(state.temperature[rows[scored], None] == 0.0, state.device)
    group = replace(
        group,
        temperature=group.temperature.masked_fill(greedy, 1.0),
        top_k=group.top_k.masked_fill(greedy, state.vocab_size),
        top_p=group.top_p.masked_fill(greedy, 1.0),
        log_min_p=group.log_min_p.masked_fill(greedy, -np.inf),
    )
    targets = np.flatnonzero(is_edited[scored])
    sources = (np.cumsum(is_edited) - 1)[scored[targets]]
    return ProcessedRows(group=group, targets=upload(targets, state.device), sources=upload(sources, state.device))


def _methods(state: SamplingState, rows: IntArray) -> IntArray:
    top_k, nucleus = state.top_k[rows], state.top_p[rows] < 1.0
    methods = np.where(nucleus, SamplingMethod.NUCLEUS, SamplingMethod.ANY)
    methods = np.where(top_k < state.vocab_size, SamplingMethod.SORTED, methods)
    methods = np.where(top_k <= min(MAX_CANDIDATES, state.vocab_size - 1), SamplingMethod.RANKED, methods)
    return np.where(state.temperature[rows] == 0.0, SamplingMethod.GREEDY, methods).astype(np.int32)


def _group(
    state: SamplingState,
    rows: IntArray,
    members: IndexArray,
    method: SamplingMethod,
    edited: bool,
    source: torch.Tensor | None,
) -> RowGroup:
    own = rows[members]
    columns = (state.temperature, state.top_k, state.top_p, state.log_min_p)
    numbers = np.stack([column[own].astype(np.float64) for column in columns])
    temperature, top_k, top_p, log_min_p = upload(numbers[:, :, None], state.device).unbind()
    return RowGroup(
        method=method,
        edited=edited,
        members=upload(members, state.device),
        source=source,
        temperature=temperature.to(torch.float32),
        top_k=top_k.to(torch.int64),
        top_p=top_p,
        log_min_p=log_min_p.to(torch.float32),
        largest_top_k=int(state.top_k[own].max()),
        uses_min_p=bool((state.log_min_p[own] > -np.inf).any()),
    )


def _edits(state: SamplingState, rows: IntArray, is_short: BoolArray) -> TokenEdits | None:
    samplings = [state.token_lists.get(row) for row in rows.tolist()]
    return collect_edits(samplings, is_short.tolist(), state.vocab, state.device)


def _penalised(state: SamplingState, rows: IntArray, places: IndexArray) -> PenalisedRows:
    numbers = np.stack((state.repetition_penalty[rows], state.frequency_penalty[rows], state.presence_penalty[rows]))
    repetition, frequency, presence = upload(numbers[:, :, None], state.device).unbind()
    return PenalisedRows(
        index=upload(places, state.device),
        rows=upload(rows.astype(np.int64), state.device),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


class StepGrouper:
    """Groups the rows of steps, and keeps the last groups as long as they hold."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._key: tuple[int, bytes, bytes] | None = None
        self._groups: StepGroups | None = None

    def groups(self, rows: IntArray, positions: IntArray) -> StepGroups:
        """The groups of ``rows`` (n,), which sample the tokens at ``positions`` (n,)."""
        state = self._state
        is_short = positions - state.num_prompt_tokens[rows] < state.min_tokens[rows]
        key = (state.version, rows.tobytes(), is_short.tobytes())
        if self._groups is None or key != self._key:
            self._groups, self._key = group_rows(state, rows, is_short), key
        return self._groups
