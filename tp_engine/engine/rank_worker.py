"""A rank other than 0, from the process groups to the stop plan."""

import contextlib
from collections.abc import Callable

from tp_engine.config import EngineConfig
from tp_engine.distributed import groups as process_groups
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.store import Store, join_store
from tp_engine.engine.hosts import Hosts
from tp_engine.engine.job import Job
from tp_engine.ipc.plan_channel import MessageSource, PlanSubscriber
from tp_engine.ipc.rank_slot import StepRecorder
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.job.progress import RankPhase
from tp_engine.job.topology import RankInfo
from tp_engine.plan import FIRST_STEP_ID, Control
from tp_engine.worker.effective_config import EffectiveConfig, resolve
from tp_engine.worker.start import start_rank
from tp_engine.worker.worker import StartedRank, Worker


def serve_own_rank(rank: int, store_address: tuple[str, int], config: EngineConfig, job: Job) -> None:
    """Run rank 0's plans until the stop plan, as a rank that rank 0 started.  ``store_address``: host and port of the
    store that rank 0 keeps."""
    effective = resolve(config)
    world_size = config.tensor_parallel_size
    info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    store = join_store(*store_address, timeout_s=config.startup_timeout_s)
    run_worker(effective, join_ranks(effective, info, store, job, job.check), job)


def join_ranks(
    effective: EffectiveConfig, info: RankInfo, store: Store, job: Job, check: Callable[[], None]
) -> RankGroups:
    """Join the process groups with the configuration's time limits; ``check`` is called in waits."""
    groups = process_groups.join(
        info,
        store,
        job.progress,
        check,
        device_type=effective.config.device,
        shares_devices=effective.device_map.is_shared,
        start_s=effective.config.startup_timeout_s,
        collective_s=effective.config.collective_timeout_s,
    )
    job.watchdog.abort, groups.report = groups.abort, job.report
    return groups


def run_worker(effective: EffectiveConfig, groups: RankGroups, job: Job, hosts: Hosts | None = None) -> None:
    """Load the model, run each plan until the stop plan, and leave the job.  ``hosts``: the connections to other hosts,
    if there are any."""
    with contextlib.ExitStack() as stack:
        stack.callback(groups.close)
        stack.push(job.on_exit)  # reports before the groups close: a closed group looks like a death
        worker = Worker(start_here(effective, groups, job, stack))
        source = _open_source(groups, job, hosts, effective.config)
        stack.callback(source.close)
        subscriber = PlanSubscriber(source, first_step_id=FIRST_STEP_ID)
        job.progress.reach(RankPhase.READY)
        job.ready()
        _run_plans(worker, subscriber, job)
    job.leave()
    job.close()


def start_here(effective: EffectiveConfig, groups: RankGroups, job: Job, stack: contextlib.ExitStack) -> StartedRank:
    """Start this process's rank, which ``stack`` closes, and tell the job's board of it; a collective."""
    groups.note_device = job.slot.note_device
    note_inputs = job.slot.note_inputs if effective.config.debug_compare_rank_inputs else None
    rank = start_rank(
        effective,
        groups,
        job.slot.tier_progress(),
        stack.enter_context(contextlib.ExitStack()),
        owns_process=job.owns_process,
        note_inputs=note_inputs,
    )
    job.slot.note_memory(rank.memory)
    job.slot.note_startup(rank.seconds)
    return rank


def _open_source(groups: RankGroups, job: Job, hosts: Hosts | None, config: EngineConfig) -> MessageSource:
    """Where this rank's plans come from: its host's ring, or, on the first rank of another host, the network."""
    info = groups.info
    if info.local_rank or hosts is None:
        names = groups.host.all_gather_bytes(b"")
        return RingReader(names[info.rank - info.local_rank].decode(), info.local_rank - 1, alive=job.alive)
    ring = None
    if info.local_world_size > 1:
        ring = RingWriter(info.local_world_size - 1, first_rank=info.rank + 1, alive=job.alive)
    groups.host.all_gather_bytes(b"" if ring is None else ring.name.encode())
    if ring is not None:
        ring.wait_attached(config.startup_timeout_s)
    return hosts.plan_reader(ring, ring_timeout_s=config.collective_timeout_s)


def _run_plans(worker: Worker, subscriber: PlanSubscriber, job: Job) -> None:
    recorder = StepRecorder(job.slot)
    while True:
        plan = subscriber.receive()
        recorder.received(plan, subscriber.last_num_bytes, subscriber.last_checksum)
        if plan.control & Control.STOP:
            job.stopping()
            job.progress.reach(RankPhase.SHUTDOWN)
            return
        recorder.begin(plan.step_id)
        if plan.order:
            worker.execute_command(plan.order)
        else:
            worker.execute(plan)
        recorder.launched(plan.step_id)
        recorder.done(plan.step_id)
