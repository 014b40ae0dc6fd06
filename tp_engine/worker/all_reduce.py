"""Whether the ranks' all-reduces go through memory that they share, and the phase of the start that sets it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tp_engine.config import EngineConfig
from tp_engine.device_map import parse_devices, shares_devices
from tp_engine.distributed.groups import HostGroup, RankGroups
from tp_engine.distributed.rank import RankInfo
from tp_engine.distributed.reduce_plan import Machine, why_not
from tp_engine.distributed.symmetric_memory import probe_machine
from tp_engine.errors import ConfigError
from tp_engine.log import get_logger
from tp_engine.worker.device import Device

logger = get_logger(__name__)

CPU_CHOICES = ("gloo", "shm")


def shares_host_memory(config: EngineConfig, info: RankInfo) -> bool:
    """Whether ranks on CPUs try shared memory, each with the other ranks of its host."""
    return config.device == "cpu" and info.local_world_size > 1 and config.all_reduce != "gloo"


def check_hosts(config: EngineConfig, num_hosts: int) -> None:
    """``ConfigError`` if ``all_reduce`` asks for memory that only ranks of one host can share, and there are more."""
    if num_hosts > 1 and config.all_reduce == "symm_mem":
        raise ConfigError(
            f"all_reduce is 'symm_mem', which is for ranks on one host, and the ranks are on {num_hosts}; leave it out"
        )
    if num_hosts > 1 and config.all_reduce == "shm" and config.tensor_parallel_size == num_hosts:
        raise ConfigError(
            "all_reduce is 'shm', but each host has one rank, which shares memory with none; leave it out"
        )


def probe_devices(config: EngineConfig, num_hosts: int = 1) -> Machine | None:
    """What the GPUs of all ranks can do; None for one rank, several hosts, and CPUs.  ``config.device`` is not auto."""
    if config.device != "cuda" or config.tensor_parallel_size == 1 or num_hosts > 1 or not torch.cuda.is_available():
        return None
    return probe_machine(parse_devices(config.devices, config.tensor_parallel_size).indices)


def uses_symmetric_memory(config: EngineConfig, machine: Machine | None) -> bool:
    """Whether GPUs try symmetric memory; ``ConfigError`` if ``all_reduce`` asks for what these ranks can not do.

    ``config`` has no ``auto`` as device and dtype.  Ranks that share a GPU run in turns, and their kernels would wait
    for each other for a whole turn: they use it only if it is asked for.
    """
    asked, is_shared = config.all_reduce, shares_devices(config.devices)
    if config.device == "cpu" and asked in ("nccl", "symm_mem"):
        raise ConfigError(f"all_reduce is {asked!r}, which is for GPUs, but the ranks run on the CPU; leave it out")
    if config.device == "cuda" and asked in CPU_CHOICES:
        raise ConfigError(f"all_reduce is {asked!r}, which is for CPUs, but the ranks run on GPUs; leave it out")
    if asked == "nccl" and is_shared:
        raise ConfigError(
            f"all_reduce is 'nccl', which refuses ranks that share a GPU, and devices is {config.devices!r}; leave "
            "all_reduce out, or use symm_mem"
        )
    if machine is None:
        return False
    obstacle = why_not(machine, config.dtype)
    if asked == "symm_mem" and obstacle is not None:
        raise ConfigError(f"all_reduce is 'symm_mem': {obstacle}; leave all_reduce out, or use nccl")
    return asked != "nccl" and obstacle is None and (asked == "symm_mem" or not is_shared)


def share_memory(
    config: EngineConfig,
    groups: RankGroups,
    run_phase: Callable[[str, Callable[[], None]], None],
    device: Device,
    *,
    num_hosts: int,
    largest_bytes: int,
) -> None:
    """Let ``groups`` all-reduce up to ``largest_bytes`` through shared memory if enabled and possible; a collective.

    GPUs map each other's memory, ranks on CPUs map memory of their host.  ``config`` has no ``auto`` as device and
    dtype.  Call it between the first snapshot and the last, so that the ledger counts the buffers.
    """
    if shares_host_memory(config, groups.info):
        is_required = config.all_reduce == "shm"
        run_phase("sharing memory", lambda: groups.use_shared_memory(is_required=is_required))
    machine = probe_devices(config, num_hosts)
    if machine is None:
        return
    machine = agreed_machine(machine, groups.host)
    if not uses_symmetric_memory(config, machine):
        obstacle = why_not(machine, config.dtype)
        if groups.info.is_first and config.all_reduce != "nccl" and obstacle is not None:
            logger.info("all-reduces do not use symmetric memory: %s", obstacle)
        return
    run_phase(
        "sharing memory between GPUs",
        lambda: groups.use_symmetric_memory(
            machine,
            device.torch_device,
            largest_bytes=largest_bytes,
            shares_devices=shares_devices(config.devices),
            is_required=config.all_reduce == "symm_mem",
            wait=device.synchronize,
        ),
    )


def agreed_machine(machine: Machine, host: HostGroup) -> Machine:
    """What holds on every rank: ranks that chose different collectives would wait for each other for ever."""
    major, minor = machine.capability
    capability, access, atomics, triton = host.all_reduce_min(
        [
            major * 1000 + minor,
            *(int(fact) for fact in (machine.has_peer_access, machine.has_peer_atomics, machine.has_triton)),
        ]
    )
    return replace(
        machine,
        capability=divmod(capability, 1000),
        has_peer_access=access == 1,
        has_peer_atomics=atomics == 1,
        has_triton=triton == 1,
    )
