"""Which sampler a rank has: for one rank or for several, in PyTorch alone or with kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tp_engine.dist.collectives import Communicator
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.sampling.device_sampler import DeviceSampler, StepKind
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.parallel import ParallelSampler
from tp_engine.sampling.processors import masked_logits
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState


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


class KernelSampler:
    """Steps that kernels can sample are sampled by ``device``, the others by ``general``; the tokens are the same."""

    def __init__(self, state: SamplingState, device: DeviceSampler, general: TokenSampler) -> None:
        self._state = state
        self.device = device
        self._general = general

    def recorded_kind(self, rows: IntArray, positions: IntArray) -> StepKind | None:
        """The kind of a step that a recording may sample: masks come with the step and are no part of one."""
        return None if self._state.masks.any_of(rows) else self.device.kind_of(rows, positions)

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
