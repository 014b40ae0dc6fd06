"""The phase of the start in which GPUs map each other's memory, or ranks on CPUs memory of their host."""

from __future__ import annotations

import torch

from tp_engine.ranks.groups import RankGroups
from tp_engine.worker.all_reduce import probe_devices, shares_host_memory, uses_symmetric_memory
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.phases import Phases


def share_memory(effective: EffectiveConfig, groups: RankGroups, phases: Phases, device: torch.device) -> None:
    """Let ``groups`` all-reduce through memory that the ranks share, if it shall be and can be; a collective.

    Between the first snapshot and the last, so that the ledger counts the buffers.
    """
    config = effective.config
    if shares_host_memory(config, groups.info):
        is_required = config.all_reduce == "shm"
        phases.run("sharing memory", lambda: groups.use_shared_memory(is_required=is_required))
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
