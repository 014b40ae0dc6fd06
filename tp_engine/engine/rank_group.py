"""Who runs the ranks: torchrun, or rank 0 itself.  Either way rank 0 ends up with an ``Engine``, the others serve it.

::

    start_engine (rank 0)                                  serve_rank / rank_main (ranks 1 to N-1)
      resolve the configuration                              the same
      start the other ranks, unless torchrun did             check in at the store
      join the process groups                  <-------->    join
      worker.start: load, profile, agree       <-------->    worker.start
      create the ring, tell its name           --------->    attach
      Engine                                   == plans =>   run each plan until the stop plan
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import msgspec

from tp_engine import env
from tp_engine.config import EngineConfig
from tp_engine.dist import groups as process_groups
from tp_engine.dist.groups import RankGroups, Store
from tp_engine.dist.rank import RankInfo
from tp_engine.engine.build import build_engine
from tp_engine.engine.engine import Engine
from tp_engine.engine.processes import ChildRanks, process_alive
from tp_engine.errors import ConfigError
from tp_engine.ipc.plan_channel import PlanSubscriber
from tp_engine.log import get_logger
from tp_engine.plan import FIRST_STEP_ID, Control
from tp_engine.worker.effective_config import EffectiveConfig, resolve
from tp_engine.worker.worker import Worker

logger = get_logger(__name__)

_STOP_TIMEOUT_S = 10.0


class RankSpec(msgspec.Struct, kw_only=True):
    """What rank 0 tells a rank that it starts, as JSON on its standard input."""

    config: dict[str, str | int | float | bool | None]
    rank: int
    store_host: str
    store_port: int
    parent_pid: int


def start_engine(config: EngineConfig) -> Engine:
    """Rank 0's engine, all ranks ready.  ``ConfigError`` is raised before any process or device is touched."""
    launched, effective = env.launched_rank(), check_config(config)
    if launched is not None and launched.world_size > 1:
        groups = _join_launched(effective, launched)
        return build_engine(effective, groups, check_ranks=lambda: None, leave=lambda: None)
    if config.tensor_parallel_size == 1:
        return build_engine(effective, process_groups.alone(), check_ranks=lambda: None, leave=lambda: None)
    return _spawn(effective)


def serve_rank(config: EngineConfig) -> None:
    """Ranks other than 0 of a torchrun job: run rank 0's plans until it says stop."""
    launched, effective = env.launched_rank(), check_config(config)
    assert launched is not None and launched.rank > 0
    run_worker(effective, _join_launched(effective, launched))


def check_config(config: EngineConfig) -> EffectiveConfig:
    """What ``config`` means for this job; ``ConfigError`` if it can not work.  Touches no device."""
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        config = _sized_by_launcher(config, launched)
    return resolve(config)


def run_worker(effective: EffectiveConfig, groups: RankGroups) -> None:
    """The life of a rank other than 0, from joining to the stop plan."""
    with contextlib.ExitStack() as stack:
        stack.callback(groups.close)
        worker = Worker(effective, groups)
        stack.callback(worker.close)
        worker.start()
        name, _, rank0_pid = groups.host.broadcast_bytes(b"").decode().partition(" ")
        subscriber = PlanSubscriber(
            name,
            groups.info.rank - 1,
            first_step_id=FIRST_STEP_ID,
            alive=lambda: process_alive(int(rank0_pid)),
        )
        stack.callback(subscriber.close)
        while True:
            plan = subscriber.receive()
            if plan.control & Control.STOP:
                return
            worker.execute(plan)


def _sized_by_launcher(config: EngineConfig, launched: env.LaunchedRank) -> EngineConfig:
    """``tensor_parallel_size`` is torchrun's world size; another value must not contradict it."""
    if config.tensor_parallel_size not in (1, launched.world_size):
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} but torchrun started {launched.world_size} ranks; "
            f"leave it out, or use --nproc-per-node {config.tensor_parallel_size}"
        )
    if launched.local_world_size != launched.world_size:
        raise ConfigError(
            f"torchrun started {launched.world_size} ranks of which {launched.local_world_size} are on this host; all "
            "ranks of one engine must share a host: use one node"
        )
    return dataclasses.replace(config, tensor_parallel_size=launched.world_size)


def _join_launched(effective: EffectiveConfig, launched: env.LaunchedRank) -> RankGroups:
    info = RankInfo(
        rank=launched.rank,
        world_size=launched.world_size,
        local_rank=launched.local_rank,
        local_world_size=launched.local_world_size,
    )
    store = process_groups.launched_store(timeout_s=effective.config.startup_timeout_s)
    return join(effective, info, store)


def join(effective: EffectiveConfig, info: RankInfo, store: Store) -> RankGroups:
    """Join the process groups with the configuration's time limits."""
    return process_groups.join(
        info,
        store,
        device_type=effective.config.device,
        start_s=effective.config.startup_timeout_s,
        collective_s=effective.config.collective_timeout_s,
    )


def _spawn(effective: EffectiveConfig) -> Engine:
    """Start ranks 1 to N-1 as children of this process and build the engine."""
    config, world_size = effective.config, effective.config.tensor_parallel_size
    store = process_groups.host_store(timeout_s=config.startup_timeout_s)
    specs = [
        RankSpec(
            config=dataclasses.asdict(config),
            rank=rank,
            store_host="127.0.0.1",
            store_port=store.port,
            parent_pid=os.getpid(),
        )
        for rank in range(1, world_size)
    ]
    children = ChildRanks("tp_engine.engine.rank_main", [msgspec.json.encode(spec) for spec in specs])
    with _killed_on_error(children):
        children.wait_until(
            lambda: store.check([check_in_key(rank) for rank in range(1, world_size)]),
            timeout_s=config.startup_timeout_s,
            what="start",
        )
        groups = join(effective, RankInfo(world_size=world_size, local_world_size=world_size), store)
        return build_engine(
            effective, groups, check_ranks=children.check, leave=lambda: children.wait(timeout_s=_STOP_TIMEOUT_S)
        )


def check_in_key(rank: int) -> str:
    """The store's key by which a started rank says that it is there."""
    return f"rank {rank} is here"


@contextlib.contextmanager
def _killed_on_error(children: ChildRanks) -> Iterator[None]:
    """If starting fails, name the rank that died, if one did, and leave no process behind."""
    try:
        yield
    except BaseException:
        try:
            children.check()
        finally:
            children.kill()
        raise
