"""One rank's worker: start in phases, then run plans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from tp_engine.attention.registry import select_backend
from tp_engine.dist.groups import RankGroups
from tp_engine.layers.sampling_state import SamplingState
from tp_engine.log import get_logger
from tp_engine.model_config import local_num_kv_heads
from tp_engine.models.registry import build_model
from tp_engine.plan import StepPlan
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.input_batch import InputBatch
from tp_engine.worker.model_runner import ModelRunner, PendingStep

logger = get_logger(__name__)


class Worker:
    """This rank's device: weights, KV cache, persistent batch."""

    def __init__(self, effective: EffectiveConfig, groups: RankGroups) -> None:
        self._effective = effective
        self._groups = groups
        self._device = torch.device("cpu")
        self._runner: ModelRunner | None = None

    def start(self) -> int:
        effective, config = self._effective, self._effective.config
        backend = select_backend(
            config.attention_backend,
            device_type=config.device,
            dtype=effective.dtype,
            block_size=config.block_size,
            head_dim=effective.model.head_dim,
        )
        model = build_model(
            effective.model,
            communicator=self._groups.communicator,
            dtype=effective.dtype,
            device=self._device,
            backend=backend,
            max_model_len=effective.max_model_len,
        )
        load_weights(
            dict(model.named_parameters()),
            effective.model,
            effective.model_path,
            info=self._groups.info,
            load_format=config.load_format,
            seed=config.seed,
        )
        model.finish_loading()
        num_blocks = config.num_gpu_blocks_override or 512
        kv_cache = torch.zeros(
            2,
            effective.model.num_layers,
            num_blocks,
            config.block_size,
            local_num_kv_heads(effective.model, config.tensor_parallel_size),
            effective.model.head_dim,
            dtype=effective.dtype,
        )
        for i, layer in enumerate(model.attention_layers):
            layer.bind_kv_cache(kv_cache[:, i])
        batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=effective.max_model_len,
            block_size=config.block_size,
            device=self._device,
        )
        sampling = (
            SamplingState(
                max_num_seqs=config.max_num_seqs, vocab_size=effective.model.vocab_size, device=self._device
            )
            if self._groups.info.is_first
            else None
        )
        self._runner = ModelRunner(
            model=model,
            backend=backend,
            batch=batch,
            kv_cache=kv_cache,
            communicator=self._groups.communicator,
            sampling=sampling,
        )
        return num_blocks

    def execute(self, plan: StepPlan) -> PendingStep:
        assert self._runner is not None
        return self._runner.run(plan)

    def close(self) -> None:
        self._runner = None
