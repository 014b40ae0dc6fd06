"""What a model runner is made of, for any number of KV blocks: a few to measure with, then the agreed number."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.attention.base import AttentionBackend
from tp_engine.dist.groups import RankGroups
from tp_engine.models.causal_lm import CausalLM
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.device import Device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.input_batch import InputBatch
from tp_engine.worker.kv_cache import KvCacheShape, allocate_kv_cache, allocate_kv_scales, bind_kv_cache
from tp_engine.worker.model_runner import ModelRunner, NoteInputs


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """One rank's loaded model and everything that a runner takes from the configuration."""

    effective: EffectiveConfig
    groups: RankGroups
    model: CausalLM
    backend: AttentionBackend
    kv_shape: KvCacheShape
    device: Device
    note_inputs: NoteInputs | None

    def make_runner(self, num_blocks: int) -> ModelRunner:
        """A runner with a KV cache of its own, to which the model's layers are bound from now on."""
        torch_device = self.device.torch_device
        kv_cache = allocate_kv_cache(self.kv_shape, num_blocks, torch_device)
        kv_scales = allocate_kv_scales(self.kv_shape, num_blocks, torch_device)
        bind_kv_cache(kv_cache, self.model.attention_layers, kv_scales)
        return ModelRunner(
            model=self.model,
            backend=self.backend,
            batch=self._make_batch(),
            kv_cache=kv_cache,
            kv_scales=kv_scales,
            communicator=self.groups.communicator,
            sampling=self._make_sampling(),
            note=self.groups.note,
            note_inputs=self.note_inputs,
        )

    def _make_batch(self) -> InputBatch:
        config = self.effective.config
        return InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.effective.max_model_len,
            block_size=config.block_size,
            device=self.device.torch_device,
        )

    def _make_sampling(self) -> SamplingState:
        return SamplingState(
            max_num_seqs=self.effective.config.max_num_seqs,
            vocab_size=self.effective.model.vocab_size,
            device=self.device.torch_device,
            info=self.groups.info,
        )
