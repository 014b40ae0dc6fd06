"""The samplers of a rank: one new token per row, without waiting for the device.

``Sampler`` is for one rank and uses PyTorch alone; ``ParallelSampler`` is for several ranks.  ``KernelSampler`` samples
with kernels the steps that they can sample, and ``GreedySampler`` lets greedy steps on a CPU be recorded::

    logits -> grammar                                                                                  (masked rows)
           -> fp32 -> allowed ids -> logit_bias -> min_tokens -> repetition -> frequency, presence      (edited rows)
           -> argmax where temperature is 0
           -> / temperature -> top_k -> top_p -> min_p -> argmax of logits + Gumbel noise               (the others)

Log-probabilities come from the raw logits, or, with ``processed_logprobs``, from those that a row is drawn from, before
the noise: minus infinity for what the filters leave out; greedy rows have no temperature.  A batch of greedy rows
without edits costs one argmax.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import torch

from tp_engine.cpu.kernels.library import native_library
from tp_engine.cpu.kernels.ops import best_tokens
from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.layers.upload import upload, upload_all
from tp_engine.plan import IntArray
from tp_engine.sampling.device_sampler import DeviceSampler, SamplerVariant
from tp_engine.sampling.filters import draw
from tp_engine.sampling.groups import StepGrouper, StepGroups, Way
from tp_engine.sampling.logprobs import LogprobTensors, score_rows
from tp_engine.sampling.noise import noise_keys
from tp_engine.sampling.parallel import ParallelSampler
from tp_engine.sampling.ranking import row_argmax, row_chunks
from tp_engine.sampling.state import SamplingState

_GREEDY = SamplerVariant()


class TokenSampler(Protocol):
    """Samples the rows of a state from this rank's slice of the logits."""

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """See ``Sampler`` and ``ParallelSampler``."""


def make_sampler(state: SamplingState, communicator: Communicator) -> TokenSampler:
    """This rank's sampler; ``state`` knows its slice of the vocabulary, and has tables if kernels can be used."""
    general: TokenSampler
    general = Sampler(state) if communicator.info.world_size == 1 else ParallelSampler(state, communicator)
    return general if state.tables is None else KernelSampler(state, DeviceSampler(state, communicator), general)


class Sampler:
    """Samples the rows of ``state``, whose rank has the whole vocabulary."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._grouper = StepGrouper(state)
        self._vocab_ids = torch.arange(state.vocab_size, dtype=torch.int32, device=state.device)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Token ids (n,) int32 on the device, and log-probabilities if any row asks for them.

        ``logits`` (n, vocab), any float type, change only in masked rows.  On the host: ``rows`` (n,), each once, and
        ``positions`` (n,), the index that the new token will have in its sequence.  Rows that did not ask for
        log-probabilities hold zeros.
        """
        state, raw = self._state, logits
        assert logits.shape == (len(rows), state.vocab_size), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        logits = state.masked(logits, rows)
        if state.is_plain[rows].all():
            return row_argmax(logits).to(torch.int32), None
        groups = self._grouper.groups(rows, positions)
        edited = groups.edited_logits(logits, state.penalties)
        tokens = (
            row_argmax(logits).to(torch.int32)
            if groups.is_plain_greedy
            else self._mixed(logits, edited, groups, rows, positions)
        )
        groups.record(tokens, state.penalties)
        if groups.scored is None:
            return tokens, None
        if groups.processed is not None:
            wanted = groups.processed.logits_of(logits, edited)
        else:
            wanted = raw if len(groups.scored) == len(rows) else raw.index_select(0, groups.scored)
        return tokens, score_rows(wanted, tokens, groups)

    def _mixed(
        self,
        logits: torch.Tensor,
        edited: torch.Tensor | None,
        groups: StepGroups,
        rows: IntArray,
        positions: IntArray,
    ) -> torch.Tensor:
        keys = upload(noise_keys(self._state.seed[rows], positions), logits.device) if groups.draws else None
        tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        for group in groups.groups:
            for start, stop in row_chunks(len(group.members), logits.shape[1], logits.device):
                part, source = group.part(start, stop), group.logits_of(logits, edited, start, stop)
                if part.way is Way.GREEDY:
                    drawn = row_argmax(source).to(torch.int32)
                else:
                    assert keys is not None
                    own_keys = keys.index_select(0, part.members)
                    drawn = draw(source.to(torch.float32), part, own_keys, self._vocab_ids)
                tokens.index_copy_(0, part.members, drawn)
        return tokens


class RecordedSampler(TokenSampler, Protocol):
    """A sampler whose steps of the ``kinds`` can be recorded, and those of ``advancing`` with the end of the step."""

    kinds: tuple[SamplerVariant, ...]
    advancing: tuple[SamplerVariant, ...]

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> SamplerVariant | None:
        """The kind of this step if a recording may sample it, else None.  ``epoch`` is ``StepPlan.rows_epoch``."""

    def sample_recorded(
        self,
        kind: SamplerVariant,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        advanced: RowTables | None = None,
    ) -> torch.Tensor:
        """The recorded part: token ids (n,) int32 from ``logits`` (n, width).

        ``rows`` (n,) int32 and the ``positions`` (n,) int64 of their last tokens are read when the recording runs.
        ``advanced``, for kinds of ``advancing``, are the tables in which the rows advance (``advance_decodes``).
        """


def recorded_sampler(sampler: TokenSampler, state: SamplingState, communicator: Communicator) -> RecordedSampler:
    """``sampler`` for recorded steps; without kernels, only greedy steps of a single rank can be recorded."""
    if isinstance(sampler, KernelSampler):
        return sampler
    is_alone = communicator.info.world_size == 1 and state.device.type == "cpu"
    return GreedySampler(sampler, state, native_library() if is_alone else None)


class GreedySampler:
    """``general`` for every step, and ``library``'s argmax for recorded greedy steps; none are recorded without it."""

    def __init__(self, general: TokenSampler, state: SamplingState, library: ctypes.CDLL | None) -> None:
        self._general, self._state, self._library = general, state, library
        self.kinds: tuple[SamplerVariant, ...] = () if library is None else (_GREEDY,)
        self.advancing: tuple[SamplerVariant, ...] = ()
        self._known = (0, -1, True)  # epoch, version of the state, the answer

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> SamplerVariant | None:
        """See ``RecordedSampler``: greedy, if every row needs nothing else."""
        return _GREEDY if self._are_plain(rows, epoch) and not self._state.masks.any_of(rows) else None

    def _are_plain(self, rows: IntArray, epoch: int) -> bool:
        """Whether all ``rows`` are greedy; looked up again for another epoch, and after an admission or a release."""
        known, version, are_plain = self._known
        if not epoch or epoch != known or version != self._state.version:
            are_plain = bool(self._state.is_plain[rows].all())
            self._known = epoch, self._state.version, are_plain
        return are_plain

    def sample_recorded(
        self,
        kind: SamplerVariant,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        advanced: RowTables | None = None,
    ) -> torch.Tensor:
        """See ``RecordedSampler``."""
        assert self._library is not None and advanced is None
        return best_tokens(self._library, logits)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """As ``general``."""
        return self._general.sample(logits, rows, positions)


class KernelSampler:
    """Samples with ``device`` what kernels can sample and with ``general`` the other steps; the tokens are the same."""

    def __init__(self, state: SamplingState, device: DeviceSampler, general: TokenSampler) -> None:
        self._state = state
        self.device = device
        self.kinds, self.advancing, self.sample_recorded = device.kinds, device.advancing, device.sample
        self._general = general

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> SamplerVariant | None:
        """See ``RecordedSampler``: masks come with the step, so a recording cannot hold them."""
        return None if self._state.masks.any_of(rows) else self.device.kind_of(rows, positions)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """As ``Sampler.sample`` or ``ParallelSampler.sample``."""
        kind = self.device.kind_of(rows, positions)
        if kind is None:
            return self._general.sample(logits, rows, positions)
        logits = self._state.masked(logits, rows)
        last_positions = positions.astype(np.int64) - 1
        on_device = upload_all((rows.astype(np.int32, copy=False), last_positions), logits.device)
        return self.device.sample(kind, logits, *on_device), None
