"""Makes a rank's runners: trial runners while memory is measured, then the one that serves."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.ops import has_triton
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.feature import RunnerFeature
from tp_engine.worker.features import RankFeature, RankParts, RunnerParts, make_features
from tp_engine.worker.graphs.step_runner import GraphPlan
from tp_engine.worker.memory.kv_cache import KvBlocks
from tp_engine.worker.model_runner import ModelRunner


class RunnerMaker:
    """Makes runners of a rank's ``parts`` and ``features`` (by name), which record the steps of ``graphs``, if any."""

    def __init__(self, parts: RankParts, features: Mapping[str, RankFeature], graphs: GraphPlan | None) -> None:
        self.parts, self.features, self.graphs = parts, features, graphs

    def make(self, num_blocks: int, progress: RankProgress, *, is_trial: bool = False) -> ModelRunner:
        """Return a runner with a KV cache of its own, to which the model's layers are bound from now on."""
        parts, effective = self.parts, self.parts.effective
        blocks = KvBlocks.allocate(effective.kv_shape, num_blocks, parts.device)
        blocks.bind(parts.attention_layers)
        batch = make_batch(effective, parts.device)
        sampling = make_sampling(effective, parts.groups.info, parts.device)
        features: list[RunnerFeature] = []
        own = RunnerParts(
            rank=parts,
            batch=batch,
            sampling=sampling,
            pool=blocks.raw,
            progress=progress,
            features=features,
            is_trial=is_trial,
        )
        features += make_features(own, self.features.values())
        return ModelRunner(
            model=parts.model,
            backends=parts.backends,
            batch=batch,
            blocks=blocks,
            communicator=parts.groups.communicator,
            sampling=sampling,
            progress=progress,
            features=features,
            choices=parts.effective.choices,
            check=parts.groups.check,
        )

    @contextmanager
    def trial(self) -> Iterator[ModelRunner]:
        """A runner with a cache of one block that reports no steps; afterwards the layers have no cache."""
        try:
            yield self.make(1, RankProgress(), is_trial=True)
        finally:
            for layer in self.parts.attention_layers:
                layer.unbind_kv_cache()
            for state_layer in self.parts.model.state_layers:
                state_layer.bind_states(None)

    @contextmanager
    def recording(self, most_rows: int) -> Iterator[ModelRunner]:
        """A trial runner that has recorded decodes of up to so many rows, if steps are recorded; a collective."""
        with self.trial() as runner:
            if self.graphs is not None:
                runner.graphs.capture(self.graphs, most_rows)
            try:
                yield runner
            finally:
                runner.graphs.forget()


def make_batch(effective: EffectiveConfig, device: torch.device) -> InputBatch:
    """Return the persistent batch of a rank, without rows."""
    config, layout = effective.config, effective.kv_layout
    return InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=effective.max_model_len,
        block_size=config.block_size,
        num_groups=len(layout.groups),
        device=device,
        num_spare_rows=effective.num_spare_rows,
        has_states=layout.states is not None,
        turns_by_place=effective.model.turns_by_place,
    )


def make_sampling(effective: EffectiveConfig, info: RankInfo, device: torch.device, **options: bool) -> SamplingState:
    """Return the sampling parameters of a rank's rows; ``options`` are further ones of ``SamplingState``."""
    return SamplingState(
        max_num_seqs=effective.config.max_num_seqs + effective.num_spare_rows,
        vocab_size=effective.model.vocab_size,
        device=device,
        info=info,
        scores_processed=effective.config.scores_processed,
        **options,
    )


def table_bytes(effective: EffectiveConfig, info: RankInfo, device_type: str) -> int:
    """Return the bytes on the device of both; nothing is allocated."""
    nowhere = torch.device("meta")
    sampling = make_sampling(effective, info, nowhere, has_tables=device_type == "cuda" and has_triton())
    return make_batch(effective, nowhere).num_bytes + sampling.num_bytes
