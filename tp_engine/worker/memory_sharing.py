"""The phase of the start in which GPUs map each other's memory."""

from __future__ import annotations

import torch

from tp_engine.dist.groups import RankGroups
from tp_engine.worker.all_reduce import probe_devices, uses_symmetric_memory
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.phases import Phases


def share_memory(effective: EffectiveConfig, groups: RankGroups, phases: Phases, device: torch.device) -> None:
    """Let ``groups`` all-reduce through symmetric memory, if it shall be and can be; a collective.

    Between the first snapshot and the last, so that the ledger counts the buffers.
    """
    config = effective.config
    machine = probe_devices(config)
    if machine is None or not uses_symmetric_memory(config, machine):
        return
    phases.run(
        "sharing memory between GPUs",
        lambda: groups.use_symmetric_memory(
            machine,
            device,
            largest_bytes=config.max_num_batched_tokens * effective.model.hidden_size * effective.dtype.itemsize,
            shares_devices=effective.device_map.is_shared,
            is_required=config.all_reduce == "symm_mem",
            fuses_norm=config.fuse_all_reduce_norm,
        ),
    )
