"""Process groups: one for device tensors (NCCL or gloo), one on the host (gloo) for short messages.

NCCL refuses ranks that share a GPU; their tensors go through the host and gloo.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _abort_process_group, _new_process_group_helper, _world

from tp_engine.distributed.collectives import Communicator, ProcessGroupCommunicator, SingleRank
from tp_engine.distributed.device_threads import use_device
from tp_engine.distributed.store import Store, WatchedStore
from tp_engine.errors import RankError, again
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

# The watchdog knows which rank the others wait for, and a library's timeout does not, so the watchdog reports first.
_AFTER_WATCHDOG_S = 5.0
_LOOPBACK = "lo"
_NAME_KEY = "name of the job"


class HostGroup:
    """Small collectives on the CPU; the identity for one rank."""

    def __init__(self, info: RankInfo, group: dist.ProcessGroup | None) -> None:
        self.info = info
        self._group = group

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""
        if self._group is None:
            return [payload]
        size = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=self._group)
        longest = int(size)
        framed = np.zeros(8 + longest, dtype=np.uint8)
        framed[:8] = np.frombuffer(len(payload).to_bytes(8, "little"), dtype=np.uint8)
        framed[8 : 8 + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        mine = torch.from_numpy(framed)
        parts = [torch.empty_like(mine) for _ in range(self.info.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        raw = [part.numpy().tobytes() for part in parts]
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in raw]


class StagedCommunicator(Communicator):
    """Collectives of device tensors through the host.  They wait for the device, so a CUDA graph cannot contain them.

    ``host`` runs them with tensors on the CPU.
    """

    def __init__(self, host: Communicator) -> None:
        self.info = host.info
        self._host = host

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._host.all_reduce(tensor.cpu()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_gather(tensor.cpu()).to(tensor.device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = self._host.gather(tensor.cpu())
        return None if gathered is None else gathered.to(tensor.device)


class RankGroups:
    """This rank's groups: its number, its collectives, and the ``progress`` that other ranks see.

    ``device_group`` is that of device tensors, and ``patience_s`` bounds its collectives.  ``close`` leaves the groups.
    ``report`` is told of an error that this rank's main thread may be unable to raise, ``note_device`` the name by
    which an operator finds the GPU.  ``device`` is where the rank computes, once it has chosen it.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        info: RankInfo,
        communicator: Communicator,
        host: HostGroup,
        progress: RankProgress,
        *,
        made: Sequence[dist.ProcessGroup] = (),
        device_group: dist.ProcessGroup | None = None,
        check: Callable[[], None] = lambda: None,
        collective_s: float = 0.0,
        store: Store | None = None,
    ) -> None:
        """``made``: the process groups, which ``close`` destroys.  ``store``: where they met.  Torch uses it later,
        too, so a reference to it must be kept."""
        self.info = info
        self.communicator = communicator
        self.host = host
        self.progress = progress
        self._made = list(made)
        self.device_group = device_group
        self.report: Callable[[BaseException], None] = lambda error: None
        self.note_device: Callable[[str], None] = lambda text: None
        self._check = check
        self._late: RankError | None = None
        self.patience_s = collective_s + _AFTER_WATCHDOG_S
        self._store = store

    def check(self) -> None:
        """Raise ``RankError`` if the job has failed; to be called while waiting."""
        if self._late is not None:
            raise again(self._late)
        self._check()

    @property
    def uses_nccl(self) -> bool:
        """Whether device tensors go through NCCL."""
        return self.device_group is not None and dist.get_backend(self.device_group) == "nccl"

    @contextmanager
    def time_limit(self, what: str, remedy: str, limit_s: float) -> Iterator[None]:
        """Limit the time of work between the GPUs, which may block in the driver: the limit ends the job, with an error
        that says ``what`` was late, and the ``remedy``."""

        def expire() -> None:
            self._late = RankError(self.info.rank, f"{what} has not ended within {limit_s:g} s: {remedy}")
            self.report(self._late)

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Abort the running collectives between devices, from any thread: they raise, and later ones do too.

        Only for NCCL; gloo's collectives raise by themselves when a peer ends.
        """
        if self.uses_nccl and self.device_group in self._made:
            use_device(self.device)  # torch asks events, which makes a context on the thread's GPU
            self._made.remove(self.device_group)
            _abort_process_group(self.device_group)

    def close(self) -> None:
        """Destroy the process groups, the last one first."""
        while self._made:
            dist.destroy_process_group(self._made.pop())
        self._store = None

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Another gloo group, of ``ranks``, which call this together; None on other ranks."""
        if self._store is None or self.info.rank not in ranks:
            return None
        place, patience = list(ranks).index(self.info.rank), timedelta(seconds=self.patience_s)
        own = f"{self._made[0].group_name} {name}"
        self._made.append(make_group("gloo", self._store, own, place, len(ranks), patience))
        return self._made[-1]


def alone(progress: RankProgress) -> RankGroups:
    """The groups of a world of one: no sockets, no collectives."""
    communicator = SingleRank()
    progress.reach(RankPhase.GROUP_INIT)
    return RankGroups(communicator.info, communicator, HostGroup(communicator.info, None), progress)


def join(
    info: RankInfo,
    store: Store,
    progress: RankProgress,
    check: Callable[[], None],
    *,
    device_type: str,
    shares_devices: bool = False,
    start_s: float,
    collective_s: float,
) -> RankGroups:
    """Meet the other ranks, and return the groups; every rank calls this.

    ``start_s`` bounds the meeting and the host group (ranks load at different speeds), ``collective_s`` every
    collective between devices.  ``shares_devices``: some GPU has several ranks.  ``check`` is called repeatedly while
    this rank waits for the others, and raises if one has died.  Raises ``RankError`` if the others do not join in time.
    """
    backend = "nccl" if device_type == "cuda" and not shares_devices else "gloo"
    if info.is_first:  # if rank 0 dies before another rank is here, only this line says where it was
        logger.info("%s: %d ranks meet", RankPhase.GROUP_INIT.label, info.world_size)
        if info.topology.num_hosts > 1:
            interface = env.collective_interface(backend)
            logger.info("%d hosts; tensors go by %s over %s", info.topology.num_hosts, backend, interface)
    env.leave_hangs_to_the_engine()
    progress.reach(RankPhase.GROUP_INIT)
    start, collective = (timedelta(seconds=seconds + _AFTER_WATCHDOG_S) for seconds in (start_s, collective_s))
    watched = WatchedStore(store, check, timeout_s=start.total_seconds())
    try:
        _meet(watched, info, progress)
        name = _name_of_job(watched, info)
        # NCCL's own threads use the store too, and must not depend on Python.
        store = watched if backend == "gloo" else store
        with env.gloo_on(_LOOPBACK if info.topology.num_hosts == 1 else None):
            host = make_group("gloo", watched, f"{name} host", info.rank, info.world_size, start)
            device = make_group(backend, store, f"{name} devices", info.rank, info.world_size, collective)
    except RankError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise RankError(info.rank, f"not all {info.world_size} ranks met within {start_s:g} s ({error})") from error
    communicator: Communicator = ProcessGroupCommunicator(info, device, progress)
    if device_type == "cuda" and backend == "gloo":
        communicator = StagedCommunicator(communicator)
    return RankGroups(
        info,
        communicator,
        HostGroup(info, host),
        progress,
        made=[host, device],
        device_group=device,
        check=check,
        collective_s=collective_s,
        store=store,
    )


def make_group(
    backend: str, store: Store, name: str, rank: int, num_ranks: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group apart from torch's default one: a program or library that has process groups of its own, or asks
    whether there are any, does not see it.  Torch has no public way to make one.  ``name`` must be the same on all
    ranks, and of no other group of this process."""
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(num_ranks, rank, [], backend, store, GroupName(name), timeout=timeout)
    _world.pg_group_ranks[group] = {place: place for place in range(num_ranks)}
    return group


def _name_of_job(store: WatchedStore, info: RankInfo) -> str:
    """Rank 0's name for the job; a process may be in several, one after the other or at once."""
    if info.is_first:
        store.set(_NAME_KEY, f"tp_engine {uuid.uuid4().hex}")
    return store.get(_NAME_KEY).decode()


def _meet(store: WatchedStore, info: RankInfo, progress: RankProgress) -> None:
    """Wait for all ranks; one that dies later is then missed in a collective, not in a rendezvous."""
    keys = [f"rank {rank} joins" for rank in range(info.world_size)]
    store.set(keys[info.rank], "1")
    progress.done()
    try:
        store.wait(keys)
    except TimeoutError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            names = ", ".join(map(str, missing))
            raise RankError(missing[0], f"has not joined the job in time (missing: {names}; {error})") from error
        raise
