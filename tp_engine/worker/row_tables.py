"""The tables of a runner's rows: what each has read, where its K/V lie, how it samples; made, or only counted."""

from __future__ import annotations

import torch

from tp_engine.kernels.ops import has_triton
from tp_engine.kv_layout import KvLayout
from tp_engine.ranks.rank import RankInfo
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.effective_config import EffectiveConfig


def make_batch(effective: EffectiveConfig, layout: KvLayout, device: torch.device) -> InputBatch:
    """Return the persistent batch of a rank, without rows."""
    config = effective.config
    return InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=effective.max_model_len,
        block_size=config.block_size,
        num_groups=len(layout.groups),
        device=device,
        num_lanes=effective.num_lanes,
    )


def make_sampling(
    effective: EffectiveConfig, info: RankInfo, device: torch.device, *, has_tables: bool | None = None
) -> SamplingState:
    """Return the sampling parameters of a rank's rows; ``has_tables`` is that of ``SamplingState``."""
    return SamplingState(
        max_num_seqs=effective.config.max_num_seqs + effective.num_lanes,
        vocab_size=effective.model.vocab_size,
        device=device,
        info=info,
        scores_processed=effective.config.scores_processed,
        has_tables=has_tables,
    )


def table_bytes(effective: EffectiveConfig, layout: KvLayout, info: RankInfo, device_type: str) -> int:
    """Return the bytes on the device of both; nothing is allocated."""
    nowhere = torch.device("meta")
    sampling = make_sampling(effective, info, nowhere, has_tables=device_type == "cuda" and has_triton())
    return make_batch(effective, layout, nowhere).num_bytes + sampling.num_bytes
