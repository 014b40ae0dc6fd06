"""Which sampler a rank has: for one rank or for several, in PyTorch alone or with kernels."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import torch

from tp_engine.kernels.native.decodes import best_tokens
from tp_engine.kernels.native.library import native_library
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.ranks.collectives import Communicator
from tp_engine.sampling.device_sampler import DeviceSampler, StepKind
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.parallel import ParallelSampler
from tp_engine.sampling.processors import masked_logits
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState

_GREEDY = StepKind()


class TokenSampler(Protocol):
    """Samples the rows of a state from this rank's slice of the logits."""

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """See ``Sampler`` and ``ParallelSampler``."""


def make_sampler(state: SamplingState, communicator: Communicator) -> TokenSampler:
    """This rank's sampler; ``state`` knows its slice of the vocabulary, and has tables where kernels can be used."""
    general: TokenSampler
    general = Sampler(state) if communicator.info.world_size == 1 else ParallelSampler(state, communicator)
    return general if state.tables is None else KernelSampler(state, DeviceSampler(state, communicator), general)


class RecordedSampler(TokenSampler, Protocol):
    """A sampler of which some steps can be recorded: those of ``kinds``."""

    kinds: tuple[StepKind, ...]

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> StepKind | None:
        """The kind of a step that a recording may sample, if there is one for this kind; None: none may.

        ``epoch`` is ``StepPlan.rows_epoch``.
        """

    def sample_recorded(
        self, kind: StepKind, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What a recording holds: token ids (n,) int32 from ``logits`` (n, width).

        ``rows`` (n,) int32 and the ``positions`` (n,) int64 of their last tokens are read when the recording runs.
        """


def recorded_sampler(sampler: TokenSampler, state: SamplingState, communicator: Communicator) -> RecordedSampler:
    """``sampler`` for steps that are recorded; without kernels only greedy ones of a single rank can be."""
    if isinstance(sampler, KernelSampler):
        return sampler
    is_alone = communicator.info.world_size == 1 and state.device.type == "cpu"
    return GreedySampler(sampler, state, native_library() if is_alone else None)


class GreedySampler:
    """``general``, but greedy steps are recorded with ``library``, unless it is None."""

    def __init__(self, general: TokenSampler, state: SamplingState, library: ctypes.CDLL | None) -> None:
        self._general, self._state, self._library = general, state, library
        self.kinds: tuple[StepKind, ...] = () if library is None else (_GREEDY,)
        self._known = (0, -1, True)  # epoch, version of the state, the answer

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> StepKind | None:
        """See ``RecordedSampler``: of rows without anything but a greedy choice."""
        return _GREEDY if self._are_plain(rows, epoch) and not self._state.masks.any_of(rows) else None

    def _are_plain(self, rows: IntArray, epoch: int) -> bool:
        """Looked up again for rows of another epoch, and after an admission."""
        known, version, are_plain = self._known
        if not epoch or epoch != known or version != self._state.version:
            are_plain = bool(self._state.is_plain[rows].all())
            self._known = epoch, self._state.version, are_plain
        return are_plain

    def sample_recorded(
        self, kind: StepKind, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See ``RecordedSampler``."""
        assert self._library is not None
        return best_tokens(self._library, logits)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """As ``general``."""
        return self._general.sample(logits, rows, positions)


class KernelSampler:
    """Steps that kernels can sample are sampled by ``device``, the others by ``general``; the tokens are the same."""

    kinds: tuple[StepKind, ...] = (StepKind(), StepKind(ranked=True))

    def __init__(self, state: SamplingState, device: DeviceSampler, general: TokenSampler) -> None:
        self._state = state
        self.device = device
        self._general = general

    def recorded_kind(self, rows: IntArray, positions: IntArray, epoch: int = 0) -> StepKind | None:
        """The kind of a step that a recording may sample: masks come with the step and are no part of one."""
        return None if self._state.masks.any_of(rows) else self.device.kind_of(rows, positions)

    def sample_recorded(
        self, kind: StepKind, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See ``RecordedSampler``."""
        return self.device.sample(kind, logits, rows.to(torch.int64), positions + 1)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """As ``Sampler.sample`` or ``ParallelSampler.sample``."""
        kind = self.device.kind_of(rows, positions)
        if kind is None:
            return self._general.sample(logits, rows, positions)
        count = len(rows)
        # Both begin at a multiple of 16 bytes: kernels are compiled anew for pointers that do not.
        numbers = np.zeros((2, count + count % 2), dtype=np.int64)
        numbers[:, :count] = rows, positions
        logits = masked_logits(logits, rows, self._state)
        on_device = upload(numbers, logits.device)[:, :count]
        return self.device.sample(kind, logits, on_device[0], on_device[1]), None
