"""The table of a model runner's optional features, how each is made, and the memory that is set aside for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tp_engine.attention.base import Backends
from tp_engine.distributed.groups import RankGroups
from tp_engine.kv_layout import KvLayout
from tp_engine.layers.attention import Attention
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.draft_head import DraftHead
from tp_engine.progress import RankProgress
from tp_engine.sampling.state import SamplingState
from tp_engine.tier_progress import TierProgress
from tp_engine.units import ceil_div
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.recurrent_states import RecurrentStatePool
from tp_engine.worker.codecs.base import Codec
from tp_engine.worker.drafters.head_drafter import HeadDrafter
from tp_engine.worker.drafters.head_passes import HeadPasses, SharedKvPasses, head_bytes
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.feature import RunnerFeature
from tp_engine.worker.image_encoder import ImageEncoder
from tp_engine.worker.input_digests import InputDigests, NoteInputs
from tp_engine.worker.lora import RankAdapters
from tp_engine.worker.results.layer_watch import LayerWatch
from tp_engine.worker.results.output_watch import OutputWatch
from tp_engine.worker.results.pooled_rows import PooledRows
from tp_engine.worker.results.prompt_scores import ScoredPrompts, positions_at_once
from tp_engine.worker.tiers.block_moves import staging_bytes
from tp_engine.worker.tiers.host_tier import HostTierWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFeatureParts:
    """What the features of a rank are made of: its loaded ``model``, a draft ``head`` if there is one, and the
    configuration.

    ``codec`` is that of a host tier, ``stores`` the channel in which it reports stores that it may refuse, and
    ``note_inputs`` gets digests of the inputs.
    """

    effective: EffectiveConfig
    groups: RankGroups
    model: CausalLM
    head: DraftHead | None
    layout: KvLayout
    backends: Backends
    device: torch.device
    codec: Codec | None
    stores: TierProgress | None
    note_inputs: NoteInputs | None

    @property
    def attention_layers(self) -> list[Attention]:
        """The layers with K/V, in the layout's order: the model's, then the draft head's."""
        return [*self.model.attention_layers, *([] if self.head is None else self.head.own_attention)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a feature shares with its runner: the ``batch`` and its rows' ``sampling``, the cache's blocks ``pool``
    (blocks, block_bytes) uint8, and where the rank says what it does.

    ``num_slots`` are those of the host tier, 0 for none.  A runner that ``is_trial`` serves no requests.
    """

    batch: InputBatch
    sampling: SamplingState
    pool: torch.Tensor
    progress: RankProgress
    num_slots: int = 0
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class FeatureKind:
    """A row of the table; ``make`` returns None where the feature is switched off.

    ``num_bytes`` returns what is set aside for it on the device, by line of the ledger.
    """

    make: Callable[[RunnerFeatureParts, RunnerParts], RunnerFeature | None]
    num_bytes: Callable[[RunnerFeatureParts], dict[str, int]] = lambda _parts: {}


def _digests(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    return None if parts.note_inputs is None or runner.is_trial else InputDigests(parts.note_inputs)


def _watch(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    return None if runner.is_trial else OutputWatch(parts.device, is_first=parts.groups.info.is_first)


def _adapters(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    limits, effective = parts.effective.adapters, parts.effective
    if limits is None:
        return None
    return RankAdapters(
        parts.model.adapted_layers,
        effective.model.names,
        max_rank=limits.max_rank,
        num_rows=effective.config.max_num_seqs + effective.num_draft_rows,
        device=parts.device,
    )


def _adapter_bytes(parts: RunnerFeatureParts) -> dict[str, int]:
    """The slots for adapters, which the model has beside its weights."""
    return {"adapters": sum(layer.num_bytes for layer in parts.model.adapted_layers)}


def _pooled_rows(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature:
    max_positions = positions_at_once(runner.batch.max_num_seqs)
    return PooledRows(len(runner.batch.num_prompt), parts.model, parts.groups.communicator, max_positions)


def _num_states(effective: EffectiveConfig) -> int:
    """Recurrent states: one for each row, then one for each draft row, then the snapshots."""
    return effective.config.max_num_seqs + effective.num_draft_rows + effective.num_snapshots


def _states(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    if parts.layout.states is None:
        return None
    states = RecurrentStatePool(parts.layout.states, _num_states(parts.effective), parts.device)
    states.bind(parts.model.state_layers)
    return states


def _state_bytes(parts: RunnerFeatureParts) -> dict[str, int]:
    states = parts.layout.states
    return {} if states is None else {"states": (_num_states(parts.effective) + 1) * states.slot_bytes}


def _host_tier(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    if parts.codec is None or not runner.num_slots:
        return None
    return HostTierWorker(runner.pool, runner.num_slots, parts.codec, parts.stores, runner.progress)


def _tier_bytes(parts: RunnerFeatureParts) -> dict[str, int]:
    if parts.codec is None:
        return {}
    return {"tables": parts.codec.work_bytes + (staging_bytes(parts.codec) if parts.device.type == "cuda" else 0)}


def _head_drafter(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    if parts.head is None:
        return None
    keeps_kv = parts.head.keeps_kv
    passes = (HeadPasses if keeps_kv else SharedKvPasses)(
        parts.head,
        parts.backends,
        (parts.effective.draft_group,) if keeps_kv else parts.head.groups,
        runner.batch,
        runner.sampling,
        parts.groups.communicator,
        parts.effective.most_drafting_rows,
    )
    return HeadDrafter(passes, runner.batch, is_first=parts.groups.info.is_first)


def _head_bytes(parts: RunnerFeatureParts) -> dict[str, int]:
    """What a draft head reads and leaves."""
    if parts.head is None:
        return {}
    config = parts.effective.config
    num_columns = ceil_div(parts.effective.max_model_len, config.block_size)
    return {"tables": head_bytes(parts.head, config.max_num_seqs, num_columns)}


def _images(parts: RunnerFeatureParts, runner: RunnerParts) -> RunnerFeature | None:
    effective = parts.effective
    if parts.model.vision is None:
        return None
    num_rows = 1 if runner.is_trial else effective.image_rows
    communicator, sum_rows = parts.groups.communicator, effective.config.max_num_batched_tokens
    return ImageEncoder(parts.model, runner.batch, num_rows, communicator, sum_rows, runner.progress)


def _image_bytes(parts: RunnerFeatureParts) -> dict[str, int]:
    """The encoder cache."""
    tower = parts.model.vision
    return {} if tower is None else {"images": parts.effective.image_rows * tower.width * tower.dtype.itemsize}


# In the order in which their hooks are called.
FEATURES: tuple[FeatureKind, ...] = (
    FeatureKind(_digests),
    FeatureKind(_watch),
    FeatureKind(lambda p, r: None if r.is_trial else LayerWatch(p.model)),
    FeatureKind(_adapters, _adapter_bytes),
    FeatureKind(_images, _image_bytes),
    FeatureKind(_states, _state_bytes),
    FeatureKind(lambda p, r: ScoredPrompts(p.model, r.batch)),
    FeatureKind(_pooled_rows),
    FeatureKind(_host_tier, _tier_bytes),
    FeatureKind(_head_drafter, _head_bytes),
)


def make_features(parts: RunnerFeatureParts, runner: RunnerParts) -> list[RunnerFeature]:
    """Return the features that the configuration asks for."""
    return [feature for kind in FEATURES if (feature := kind.make(parts, runner)) is not None]


def count_bytes(parts: RunnerFeatureParts) -> Counter[str]:
    """Return the memory to set aside for all features, by line of the ledger."""
    found: Counter[str] = Counter()
    for kind in FEATURES:
        found.update(kind.num_bytes(parts))
    return found
