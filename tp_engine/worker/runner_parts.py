"""What a model runner is made of, for any number of KV blocks: one for trials, then the agreed number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tp_engine.attention.base import Backends
from tp_engine.kernels.ops import has_triton
from tp_engine.kv_layout import KvLayout
from tp_engine.layers.attention import Attention
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.draft_head import DraftHead
from tp_engine.progress import RankProgress
from tp_engine.ranks.groups import RankGroups
from tp_engine.sampling.state import SamplingState
from tp_engine.tier_progress import TierProgress
from tp_engine.worker.adapters import RankAdapters
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.row_states import RowStates
from tp_engine.worker.codecs.base import Codec
from tp_engine.worker.device import Device
from tp_engine.worker.drafters.drafter import Drafter
from tp_engine.worker.drafters.head_drafter import HeadDrafter
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape
from tp_engine.worker.model_runner import ModelRunner, NoteInputs
from tp_engine.worker.results.output_watch import OutputWatch
from tp_engine.worker.tiers.block_moves import staging_bytes
from tp_engine.worker.tiers.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """One rank's loaded model and all that a runner takes from the configuration.

    ``codec`` is that of a host tier, and ``stores`` the channel in which it reports stores that it may refuse.
    """

    effective: EffectiveConfig
    groups: RankGroups
    model: CausalLM
    layout: KvLayout
    backends: Backends
    kv_shape: KvCacheShape
    device: Device
    note_inputs: NoteInputs | None
    codec: Codec | None = None
    stores: TierProgress | None = None
    head: DraftHead | None = None

    def make_runner(self, num_blocks: int, num_slots: int) -> ModelRunner:
        """A runner with a KV cache of its own, to which the model's layers are bound from now on.

        With ``num_slots`` above 0 it has a host tier too.
        """
        watch = OutputWatch(self.device.torch_device, is_first=self.groups.info.is_first)
        return self._make_runner(num_blocks, self.groups.progress, self.note_inputs, num_slots, watch)

    @contextmanager
    def trial_runner(self) -> Iterator[ModelRunner]:
        """A runner with a cache of one block that reports no steps; afterwards the layers have no cache."""
        try:
            yield self._make_runner(1, RankProgress(), None)
        finally:
            for layer in self._attention_layers:
                layer.unbind_kv_cache()
            for state_layer in self.model.state_layers:
                state_layer.bind_states(None)

    def _make_runner(
        self,
        num_blocks: int,
        progress: RankProgress,
        note_inputs: NoteInputs | None,
        num_slots: int = 0,
        watch: OutputWatch | None = None,
    ) -> ModelRunner:
        torch_device = self.device.torch_device
        blocks = KvBlocks.allocate(self.kv_shape, num_blocks, torch_device)
        blocks.bind(self._attention_layers)
        batch = self._make_batch(torch_device)
        states = None
        if self.layout.states is not None:
            states = RowStates(self.layout.states, self._num_slots, torch_device)
            states.bind(self.model.state_layers)
        tier = None
        if self.codec is not None and num_slots:
            tier = HostTier(blocks.raw, num_slots, self.codec, self.stores)
        return ModelRunner(
            model=self.model,
            backends=self.backends,
            batch=batch,
            blocks=blocks,
            states=states,
            adapters=self._make_adapters(torch_device),
            drafter=self._make_drafter(batch),
            tier=tier,
            communicator=self.groups.communicator,
            sampling=self._make_sampling(torch_device),
            progress=progress,
            note_inputs=note_inputs,
            watch=watch,
            check=self.groups.check,
        )

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the slots for adapters, which the model has beside its weights."""
        return sum(layer.num_bytes for layer in self.model.adapted_layers)

    @property
    def _attention_layers(self) -> list[Attention]:
        """The layers with K/V, in the layout's order: the model's, then the draft head's."""
        return [*self.model.attention_layers, *([] if self.head is None else [self.head.attention_layer])]

    def _make_drafter(self, batch: InputBatch) -> Drafter | None:
        if self.head is None:
            return None
        return HeadDrafter(self.head, self.backends, self.effective.draft_group, batch, self.groups.communicator)

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows' tables, of a draft head's states, and of the host tier's codec, which a runner has beside
        its KV cache."""
        nowhere, on_gpu = torch.device("meta"), self.device.type == "cuda"
        sampling = self._make_sampling(nowhere, has_tables=on_gpu and has_triton())
        tier = 0
        if self.codec is not None:
            tier = self.codec.work_bytes + (staging_bytes(self.codec) if on_gpu else 0)
        head = self.head
        states = 0 if head is None else self.effective.config.max_num_seqs * head.state_bytes
        return self._make_batch(nowhere).num_bytes + sampling.num_bytes + states + tier

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all rows, and of snapshots."""
        states = self.layout.states
        return 0 if states is None else (self._num_slots + 1) * states.slot_bytes

    @property
    def _num_slots(self) -> int:
        """Recurrent states: one for each row, then the snapshots."""
        return self.effective.config.max_num_seqs + self.effective.num_snapshots

    def _make_batch(self, device: torch.device) -> InputBatch:
        config = self.effective.config
        return InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.effective.max_model_len,
            block_size=config.block_size,
            num_groups=len(self.layout.groups),
            device=device,
            num_lanes=self.effective.num_lanes,
        )

    def _make_adapters(self, device: torch.device) -> RankAdapters | None:
        limits, config = self.effective.adapters, self.effective.config
        if limits is None:
            return None
        return RankAdapters(
            self.model.adapted_layers,
            self.effective.model.names,
            max_rank=limits.max_rank,
            num_rows=config.max_num_seqs + self.effective.num_lanes,
            device=device,
        )

    def _make_sampling(self, device: torch.device, **options: bool) -> SamplingState:
        return SamplingState(
            max_num_seqs=self.effective.config.max_num_seqs + self.effective.num_lanes,
            vocab_size=self.effective.model.vocab_size,
            device=device,
            info=self.groups.info,
            scores_processed=self.effective.config.scores_processed,
            **options,
        )
