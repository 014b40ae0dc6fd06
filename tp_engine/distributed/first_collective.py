"""The first all-reduce between GPUs, tried at the start: with a deadline, and with the remedy in the error.

NCCL creates its communicator in the first collective, and much can go wrong there that no query of the driver tells:
GPUs behind PCIe whose reads of each other the IOMMU redirects (the sum never ends), a fabric manager that does not run
or does not match the driver (multicast cannot be bound), a network interface that leads nowhere.  Later, in the middle
of the first step, the same fault looks like a slow model.
"""

from collections.abc import Callable

import torch

from tp_engine.distributed.groups import RankGroups
from tp_engine.errors import RankError
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_DEADLINE_S = 20.0  # a communicator of 8 GPUs takes some seconds
_DEADLINE_OF_HOSTS_S = 60.0  # those of several hosts meet over the network
_HANGS = (
    "if the GPUs are on PCIe, an IOMMU or ACS redirects what they read from each other: start with NCCL_P2P_DISABLE=1, "
    "or switch both off in the firmware (iommu=pt on Linux's command line); if they are on NVLink switches: "
    "NCCL_NVLS_ENABLE=0; NCCL_DEBUG=INFO prints where it stops"
)
_OF_NETWORK = (
    "over several hosts, NCCL_SOCKET_IFNAME (or --socket-interface) must name the interface that leads to the others"
)
# What NCCL's error says, in lower case, and the remedy.
_REMEDIES = {
    ("nvls", "multicast", "cuda failure 401", "cuda failure 801", "cuda failure 802"): (
        "start with NCCL_NVLS_ENABLE=0; on machines with NVLink switches NVIDIA's fabric manager must run and have the "
        "driver's version (systemctl status nvidia-fabricmanager)"
    ),
    ("peer access", "p2p"): "start with NCCL_P2P_DISABLE=1",
    ("/dev/shm", "shared memory", "no space left"): (
        "/dev/shm is too small for NCCL: a container must be started with --shm-size 1g or --ipc host, or with "
        "NCCL_SHM_DISABLE=1"
    ),
    ("socket", "connection", "network", "remote process"): _OF_NETWORK,
}


def try_first_collective(groups: RankGroups, device: torch.device, wait: Callable[[], None]) -> None:
    """All-reduce a one from every rank; ``wait`` waits for all launched work.  A collective.

    Raises ``RankError`` with NCCL's version and the remedy if it fails, gives a wrong sum, or does not end in time; in
    the last case the job is told, too, because this thread may be unable to raise.
    """
    num_hosts = groups.info.topology.num_hosts
    deadline_s = _DEADLINE_S if num_hosts == 1 else _DEADLINE_OF_HOSTS_S
    remedy = _HANGS if num_hosts == 1 else f"{_OF_NETWORK}; {_HANGS}"
    kept_out = env.graphs_stay_unregistered()
    version = nccl_version()
    what = f"NCCL {version}: the first all-reduce between GPUs"
    if groups.info.is_first:
        logger.info("NCCL %s between %d GPUs%s", version, groups.info.world_size, f"; {kept_out}" if kept_out else "")
    ones = torch.ones(1, dtype=torch.float32, device=device)
    try:
        with groups.time_limit(what, remedy, deadline_s):
            total = groups.communicator.all_reduce(ones)
            wait()
    except RankError:
        raise
    except RuntimeError as error:  # torch.distributed.DistBackendError, or one of CUDA behind it
        text = " ".join(str(error).split())
        raise RankError(groups.info.rank, f"{what} failed: {text}; {remedy_for(text)}") from error
    if (found := float(total)) != groups.info.world_size:
        raise RankError(
            groups.info.rank,
            f"{what} gave {found:g}, and {groups.info.world_size} ranks added 1 each: what the GPUs "
            f"read from each other is wrong; {_HANGS}",
        )


def remedy_for(text: str) -> str:
    """What a user can do about NCCL's error ``text``."""
    lowered = text.lower()
    named = (remedy for words, remedy in _REMEDIES.items() if any(word in lowered for word in words))
    return next(named, "NCCL_DEBUG=INFO prints what it tried")


def nccl_version() -> str:
    """NCCL's version, such as ``2.27.5``; ``of unknown version`` where torch does not tell."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, TypeError):
        return "of unknown version"
