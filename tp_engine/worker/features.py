"""A model runner's optional features, how each is made, and the memory that is set aside for it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tp_engine.attention.base import Backends
from tp_engine.distributed.groups import RankGroups
from tp_engine.features.registry import halves
from tp_engine.job.progress import RankProgress
from tp_engine.job.tier_progress import TierProgress
from tp_engine.layers.attention import Attention
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.language_model import LanguageModel
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.recurrent_states import RecurrentStatePool
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.feature import RunnerFeature
from tp_engine.worker.image_encoder import ImageEncoder
from tp_engine.worker.input_digests import InputDigests, NoteInputs
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Prepare, StartUp
from tp_engine.worker.results.output_watch import OutputWatch
from tp_engine.worker.results.pooled_rows import PooledRows
from tp_engine.worker.results.prompt_scores import ScoredPrompts, positions_at_once
from tp_engine.worker.trial_steps import Variation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What the features of a rank are made of: its loaded ``model``, a draft ``head`` if there is one, and the
    configuration.

    ``channels``: where the rank says what has ended of work that no step waits for, by name.  ``note_inputs`` gets
    digests of the inputs.
    """

    effective: EffectiveConfig
    groups: RankGroups
    start_up: StartUp
    model: LanguageModel
    head: DraftHead | None
    backends: Backends
    device: torch.device
    channels: Mapping[str, TierProgress]
    note_inputs: NoteInputs | None

    @property
    def attention_layers(self) -> list[Attention]:
        """The layers with K/V, in the layout's order: the model's, then the draft head's."""
        return [*self.model.attention_layers, *([] if self.head is None else self.head.own_attention)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What the features of a runner are made of: those of the ``rank``, and what they share with their runner: the
    ``batch`` and its rows' ``sampling``, the cache's blocks ``pool`` (blocks, block_bytes) uint8, and where the rank
    says what it does; ``features`` are those that were made before.  A runner that ``is_trial`` serves no requests.
    """

    rank: RankParts
    batch: InputBatch
    sampling: SamplingState
    pool: torch.Tensor
    progress: RankProgress
    features: Iterable[RunnerFeature]
    is_trial: bool = False


TrialRunner: TypeAlias = Callable[[int], AbstractContextManager[ModelRunner]]
"""Opens a runner with a cache of one block that has recorded decodes of up to so many rows, as steps will be."""


class RankFeature:
    """A feature's half of a rank, from the loaded weights to the end; its halves of runners come and go with these.
    It keeps none of the ``parts``, because the model may be replaced."""

    def reserved(self) -> Counter[str]:
        """Return the memory to set aside on the device, by line of the ledger."""
        return Counter()

    @property
    def host_bytes(self) -> int:
        """Memory of the host that it takes once it is settled."""
        return 0

    def settle(self, parts: RankParts, num_blocks: int) -> None:
        """Agree on sizes, once the ranks have agreed on the number of blocks; a collective."""

    def warm_up(self, parts: RankParts, runner: ModelRunner, vary: Variation) -> None:
        """Run first steps of the feature, and its largest decodes, as ``vary`` makes them, after those of
        ``trial_steps.warm_up``; a collective."""

    def measure(self, parts: RankParts, trial: TrialRunner) -> None:
        """Measure steps before the cache is allocated; a collective."""

    def runner(self, parts: RunnerParts) -> Iterator[RunnerFeature]:
        """Yield what a runner has of the feature."""
        yield from ()

    def variations(self) -> Iterable[Variation]:
        """Return what makes other kinds of steps of trial steps, for warming up what the feature adds to a step."""
        return ()

    def open(self, parts: RankParts, runner: ModelRunner) -> None:
        """Open what needs the runner, before it records steps; a collective."""

    def orders(self, runner: ModelRunner) -> dict[str, Prepare]:
        """Return what prepares the orders that it follows, by name."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""


def make_features(own: RunnerParts, of_rank: Iterable[RankFeature]) -> Iterator[RunnerFeature]:
    """Make the features that the configuration asks for, in the order in which their hooks are called."""
    parts, batch, progress = own.rank, own.batch, own.progress
    effective, model, groups = parts.effective, parts.model, parts.groups
    if parts.note_inputs is not None and not own.is_trial:
        yield InputDigests(parts.note_inputs)
    if not own.is_trial:
        yield OutputWatch(parts.device, is_first=groups.info.is_first)
    if model.vision is not None:
        num_rows = 1 if own.is_trial else effective.image_rows
        sum_rows = effective.config.max_num_batched_tokens
        yield ImageEncoder(model, num_rows, groups.communicator, sum_rows, progress)
    if effective.kv_layout.states is not None:
        states = RecurrentStatePool(effective.kv_layout.states, _num_states(effective), parts.device)
        states.bind(model.state_layers)
        yield states
    yield ScoredPrompts(model, batch)
    yield PooledRows(len(batch.num_prompt), model, groups.communicator, positions_at_once(batch.max_num_seqs))
    for feature in of_rank:
        yield from feature.runner(own)
    yield from halves("runner", own)


def _num_states(effective: EffectiveConfig) -> int:
    """Recurrent states: one for each row, then one for each draft row, then the snapshots."""
    return effective.config.max_num_seqs + effective.num_spare_rows + effective.num_snapshots


def count_bytes(parts: RankParts, of_rank: Iterable[RankFeature]) -> Counter[str]:
    """Return the memory to set aside on the device for all features, by line of the ledger: the encoder cache, the
    recurrent states, and what features of the rank say themselves."""
    effective, tower = parts.effective, parts.model.vision
    states = effective.kv_layout.states
    found: Counter[str] = Counter()
    if tower is not None:
        found["images"] = effective.image_rows * tower.width * tower.dtype.itemsize + tower.unfinished_bytes
    if states is not None:
        found["states"] = (_num_states(effective) + 1) * states.slot_bytes
    for feature in of_rank:
        found += feature.reserved()
    return found
