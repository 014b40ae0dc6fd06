"""What the ranks of a torchrun job check of their machine: all kinds of all-reduce, and copies between GPUs.

``torchrun --nproc-per-node 8 -m tp_engine check`` runs it on every rank, before the model is checked.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tp_engine.apps.check.collectives import Way, check_collectives, check_speed
from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.config import EngineConfig
from tp_engine.distributed.all_reduce import STRATEGIES, Ranks, ReduceDevice, agreed_machine, probe_devices
from tp_engine.distributed.groups import RankGroups
from tp_engine.engine.start import joined_ranks
from tp_engine.errors import RankError
from tp_engine.job.device_map import parse_devices
from tp_engine.system.units import MIB
from tp_engine.worker.gpu_host import choose_device_type, devices_of_ranks

_SPEED_BYTES = {"cuda": 32 * MIB, "cpu": 4 * MIB}
_LARGEST_BYTES = 8 * MIB
_COPY_BYTES = 64 * MIB
_COPIES = 5
_SLOW = 0.5


def check_machine(
    config: EngineConfig, world_size: int, begin: Callable[[str], None] = lambda what: None
) -> Iterator[CheckFinding]:
    """Yield the findings; every rank of the job calls this.  ``begin`` is told what this rank does next.

    ``RankError`` if a rank dies, or keeps the others waiting for ``config.startup_timeout_s``.
    """
    config = dataclasses.replace(
        config, device=choose_device_type(config.device), tensor_parallel_size=world_size, dtype="bfloat16"
    )
    if config.device == "cuda":
        config = dataclasses.replace(config, device_ids=devices_of_ranks(config.device_ids, world_size))
    if world_size == 1:
        detail = "one rank has nothing to add up; torchrun --nproc-per-node N starts more"
        yield CheckFinding.skipped("collectives", detail)
        return
    begin("meeting the other ranks")
    with joined_ranks(config) as groups:
        index = parse_devices(config.device_ids, world_size).indices[groups.info.local_rank]
        device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", index)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        yield from _check_ways(
            config, groups, ReduceDevice(torch_device=device, largest_bytes=_LARGEST_BYTES, wait=wait), begin
        )
        yield _check_copies_of_first(config, groups, begin)
        begin("leaving")


def _check_ways(
    config: EngineConfig, groups: RankGroups, device: ReduceDevice, begin: Callable[[str], None]
) -> Iterator[CheckFinding]:
    """Every row of the engine's table for this kind of device."""
    library = groups.communicator
    machine = probe_devices(config)
    machine = None if machine is None else agreed_machine(machine, groups.host)
    for name, row in STRATEGIES.items():
        if row.device != config.device:
            continue
        asked = Ranks(config=dataclasses.replace(config, all_reduce_backend=name), machine=machine)
        if (obstacle := row.why_not(asked)) is not None:
            yield CheckFinding.skipped(f"collectives, {name}", obstacle)
            continue
        begin(f"setting up {name}")
        groups.communicator = library
        try:
            communicator = library if row.make is None else row.make(asked, groups, device)
        except RankError as error:  # the ranks have agreed: all raise it, and go on
            groups.check()
            yield CheckFinding.wrong(
                f"collectives, {name}",
                str(error),
                place=f"rank {error.rank}",
                meaning="the driver says that this way works, and it does not; auto would go another way, "
                "and be slower",
                remedy="other values of --all-reduce-backend; the settings of IOMMU and ACS, and the driver",
            )
            continue
        way = Way(
            name=name, communicator=communicator, host=groups.host, device=device.torch_device, wait=device.wait,
            begin=begin,
        )  # fmt: skip
        yield from check_collectives(way)
        yield check_speed(way, _SPEED_BYTES[config.device])


def _check_copies_of_first(config: EngineConfig, groups: RankGroups, begin: Callable[[str], None]) -> CheckFinding:
    """Rank 0 copies between all GPUs, and tells the others what it found."""
    begin("copies between GPUs, by rank 0")
    indices = sorted(set(parse_devices(config.device_ids, groups.info.world_size).indices))
    if config.device == "cpu" or len(indices) == 1:
        return CheckFinding.skipped("peer copies", "needs two GPUs")
    found = None
    if groups.info.is_first:
        found = check_copies([torch.device("cuda", index) for index in indices], torch.cuda.synchronize)
    verdict = groups.host.all_gather_bytes(b"" if found is None else found.status.encode())[0]
    return found or CheckFinding(name="peer copies", status=CheckStatus(verdict.decode()), detail="as rank 0 found")


def check_copies(
    devices: Sequence[torch.device], wait: Callable[[torch.device], None], num_bytes: int = _COPY_BYTES
) -> CheckFinding:
    """Copy ``num_bytes`` from each device to each other one: the bytes must arrive; the bandwidth is told in GB/s."""
    started_s, speeds, lost = time.monotonic(), {}, []
    for source in devices:
        sent = torch.arange(num_bytes, device=source, dtype=torch.int64).remainder_(251).to(torch.uint8)
        for target in devices:
            if target is source:
                continue
            received = torch.zeros(num_bytes, dtype=torch.uint8, device=target)
            times_s = []
            for _ in range(_COPIES + 1):
                _wait_for(wait, source, target)
                begun_s = time.perf_counter()
                received.copy_(sent)
                _wait_for(wait, source, target)
                times_s.append(time.perf_counter() - begun_s)
            pair = f"{source} -> {target}"
            speeds[pair] = num_bytes / statistics.median(times_s[1:]) / 1e9
            if not torch.equal(
                received, torch.arange(num_bytes, device=target, dtype=torch.int64).remainder_(251).to(torch.uint8)
            ):
                lost.append(pair)
    slowest, middle = min(speeds, key=speeds.__getitem__), statistics.median(speeds.values())
    detail = f"{len(speeds)} pairs: {middle:.1f} GB/s, the slowest {slowest}, {speeds[slowest]:.1f}"
    if speeds[slowest] < _SLOW * middle:
        slow = [pair for pair, speed in speeds.items() if speed < _SLOW * middle]
        detail += f"; under half of the usual speed: {', '.join(slow)}"
    return CheckFinding(
        name="peer copies",
        status=CheckStatus.WRONG if lost else CheckStatus.RIGHT,
        detail=f"bytes were lost between {', '.join(lost)}" if lost else detail,
        place=lost[0] if lost else "",
        meaning="what GPUs write to each other is dropped on its way" if lost else "",
        remedy="switch IOMMU or ACS off in the host's firmware, or start with NCCL_P2P_DISABLE=1" if lost else "",
        numbers=speeds,
        seconds=time.monotonic() - started_s,
    )


def _wait_for(wait: Callable[[torch.device], None], *devices: torch.device) -> None:
    for device in devices:
        wait(device)
