"""The ways to all-reduce, one row each: where a way can be used, why not, and how its communicator is made.

::

    symm_mem   GPUs   NCCL for large tensors, others in memory that the GPUs share: one-shot, two-shot, multimem
    nccl       GPUs   NCCL alone; ranks that share a GPU have gloo through the host instead
    shm        CPUs   memory that a host's ranks share, in one or two shots, and gloo for the rest; with several hosts
                      in two levels (``two_level.py``)
    gloo       CPUs   gloo alone

``--all-reduce-backend`` names a row, and ``auto`` takes the device's first one that can be used
(``config.ALL_REDUCES`` has the names).  Every row adds parts as a tree where layers ask for it
(``Communicator.tree_reduce``).  A new row goes here, and its communicator into a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import torch

from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.first_collective import try_first_collective
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.rank import Agreeing
from tp_engine.distributed.reduce_plan import Machine, why_not
from tp_engine.distributed.shared_memory import with_shared_memory
from tp_engine.distributed.symmetric_memory import allocate_symmetric, probe_machine, with_symmetric_memory
from tp_engine.distributed.two_level import swap_between
from tp_engine.errors import ConfigError
from tp_engine.job.device_map import parse_devices, shares_devices
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

RunPhase = Callable[[str, Callable[[], None]], None]

_SYMMETRIC_S = 20.0
_SYMMETRIC_REMEDY = "the links between the GPUs do not work as the driver says; start with --all-reduce-backend nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What the choice depends on: ``config``, whose device and dtype are not ``auto``, and what the ranks' GPUs can do,
    if known."""

    config: EngineConfig
    num_hosts: int = 1
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceDevice:
    """This rank's device, the size of a step's largest tensor, and ``wait``, which waits for all launched work."""

    torch_device: torch.device
    largest_bytes: int
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A row: ``why_not`` says why ranks on its ``device`` cannot use it, None if they can; ``remedy`` is for users who
    asked for it nevertheless.

    ``make``, a collective, returns its communicator; None if groups have it from the start.  The log names it by
    ``phase``.
    """

    device: str
    why_not: Callable[[Ranks], str | None]
    remedy: str = "leave it out"
    phase: str = ""
    make: Callable[[Ranks, RankGroups, ReduceDevice], Communicator] | None = None


def _why_not_symmetric(ranks: Ranks) -> str | None:
    """Ranks that share a GPU run in turns, and a kernel that waits for another's would wait for a whole turn: they use
    symmetric memory only if it is asked for."""
    if ranks.num_hosts > 1:
        return f"symmetric memory is for ranks on one host, and the ranks are on {ranks.num_hosts}"
    if ranks.machine is None:
        return "each rank sees its own GPU alone, so nothing is known of the links between them"
    if ranks.config.all_reduce_backend == "auto" and shares_devices(ranks.config.device_ids):
        return "ranks that share a GPU run in turns"
    return why_not(ranks.machine, ranks.config.dtype)


def _why_not_nccl(ranks: Ranks) -> str | None:
    devices = ranks.config.device_ids
    return f"NCCL refuses ranks that share a GPU, and device_ids is {devices!r}" if shares_devices(devices) else None


def _why_not_shared(ranks: Ranks) -> str | None:
    is_alone = ranks.config.tensor_parallel_size == ranks.num_hosts
    return "each host has one rank, which shares memory with none" if is_alone else None


def _make_symmetric(ranks: Ranks, groups: RankGroups, device: ReduceDevice) -> Communicator:
    group, machine = groups.device_group, ranks.machine
    assert group is not None and machine is not None, "a world of one has nothing to share"
    if shares_devices(ranks.config.device_ids):
        env.let_ranks_share_devices()
    return with_symmetric_memory(
        groups.communicator,
        machine,
        lambda num_bytes: allocate_symmetric(num_bytes, device.torch_device, group),
        groups.host,
        groups.progress,
        device=device.torch_device,
        largest_bytes=device.largest_bytes,
        is_required=ranks.config.all_reduce_backend == "symm_mem",
        wait=device.wait,
        within=lambda what: groups.time_limit(f"symmetric memory: {what}", _SYMMETRIC_REMEDY, _SYMMETRIC_S),
    )


def _make_shared(ranks: Ranks, groups: RankGroups, device: ReduceDevice) -> Communicator:
    topology, swap = groups.info.topology, None
    if topology.num_hosts > 1:  # the first ranks of all hosts join the sums
        firsts = [topology.leader_of(host) for host in range(topology.num_hosts)]
        group = groups.new_group("hosts", firsts)
        swap = None if group is None else swap_between(group, len(firsts))
    return with_shared_memory(
        groups.communicator,
        groups.host,
        groups.progress,
        groups.check,
        timeout_s=groups.patience_s,
        is_required=ranks.config.all_reduce_backend == "shm",
        swap=swap,
    )


STRATEGIES: dict[str, Strategy] = {
    "symm_mem": Strategy(
        device="cuda",
        why_not=_why_not_symmetric,
        remedy="leave all_reduce_backend out, or use nccl",
        phase="sharing memory between GPUs",
        make=_make_symmetric,
    ),
    "nccl": Strategy(device="cuda", why_not=_why_not_nccl, remedy="leave all_reduce_backend out, or use symm_mem"),
    "shm": Strategy(device="cpu", why_not=_why_not_shared, phase="sharing memory", make=_make_shared),
    "gloo": Strategy(device="cpu", why_not=lambda ranks: None),
}


def choose(ranks: Ranks) -> Strategy | None:
    """The row that ``ranks`` use; None for a single rank, or if no row can be used.

    Raises ``ConfigError`` if ``all_reduce_backend`` asks for a row that they cannot use.
    """
    config, asked = ranks.config, ranks.config.all_reduce_backend
    row = STRATEGIES.get(asked)
    if row is not None and row.device != config.device:
        where = "the CPU" if config.device == "cpu" else "GPUs"
        of = "GPUs" if row.device == "cuda" else "CPUs"
        raise ConfigError(
            f"all_reduce_backend is {asked!r}, which is for {of}, but the ranks run on {where}; leave it out"
        )
    if config.tensor_parallel_size == 1:
        return None
    if row is not None and (obstacle := row.why_not(ranks)) is not None:
        raise ConfigError(f"all_reduce_backend is {asked!r}, but {obstacle}; {row.remedy}")
    own = (one for one in STRATEGIES.values() if one.device == config.device and one.why_not(ranks) is None)
    return row or next(own, None)


def check(config: EngineConfig, num_hosts: int = 1) -> None:
    """Raise ``ConfigError`` if ``all_reduce_backend`` cannot be used, as far as one host can tell."""
    choose(Ranks(config=config, num_hosts=num_hosts, machine=probe_devices(config, num_hosts)))


def probe_devices(config: EngineConfig, num_hosts: int = 1) -> Machine | None:
    """What the GPUs of all ranks can do; None for one rank, several hosts, and CPUs.  ``config.device`` is not auto."""
    if config.device != "cuda" or config.tensor_parallel_size == 1 or num_hosts > 1 or not torch.cuda.is_available():
        return None
    devices = parse_devices(config.device_ids, config.tensor_parallel_size)
    return None if devices.are_own else probe_machine(devices.indices)  # a rank cannot ask about GPUs it does not see


def set_up(
    config: EngineConfig, groups: RankGroups, run_phase: RunPhase, device: ReduceDevice, *, num_hosts: int
) -> None:
    """Give ``groups`` the communicator of the row that its ranks use; a collective.

    Call it between the first snapshot and the last, so that the ledger counts the buffers.
    """
    if groups.uses_nccl:
        run_phase("first all-reduce", lambda: try_first_collective(groups, device.torch_device, device.wait))
    machine = probe_devices(config, num_hosts)
    if machine is not None:
        machine = agreed_machine(machine, groups.host)
        obstacle = why_not(machine, config.dtype)
        if groups.info.is_first and config.all_reduce_backend != "nccl" and obstacle is not None:
            logger.info("all-reduces do not use symmetric memory: %s", obstacle)
    ranks = Ranks(config=config, num_hosts=num_hosts, machine=machine)
    row = choose(ranks)
    if row is None or (make := row.make) is None:
        return

    def take() -> None:
        groups.communicator = make(ranks, groups, device)

    run_phase(row.phase, take)


def agreed_machine(machine: Machine, host: Agreeing) -> Machine:
    """What holds on every rank: ranks that chose different collectives would wait for each other for ever."""
    reports = host.all_gather_bytes(msgspec.json.encode(machine))
    machines = [msgspec.json.decode(report, type=Machine) for report in reports]
    facts = ("has_peer_access", "has_peer_atomics", "has_triton")
    agreed = {name: all(getattr(one, name) for one in machines) for name in facts}
    return replace(machine, capability=min(one.capability for one in machines), **agreed)
