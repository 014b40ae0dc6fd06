"""A rank other than 0: the process that rank 0 starts for it, and its life from the process groups to the stop plan.

``main`` reads its ``RankSpec`` from standard input.  Where torchrun starts the ranks, ``start.serve_rank`` calls
``run_worker`` instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from tp_engine.child_process import ignore_interrupts
from tp_engine.config import EngineConfig
from tp_engine.engine.job import Job
from tp_engine.engine.processes import die_with_parent
from tp_engine.faults import configured_faults, fault_injector
from tp_engine.ipc.plan_channel import MessageSource, PlanSubscriber
from tp_engine.ipc.rank_slot import StepRecorder
from tp_engine.ipc.ring_buffer import RingReader, RingWriter
from tp_engine.log import configure_logging, get_logger
from tp_engine.plan import FIRST_STEP_ID, Control
from tp_engine.progress import RankPhase, RankProgress

if TYPE_CHECKING:  # torch: it takes seconds to import, and the job's watchdog must see the rank before that
    from tp_engine.engine.hosts import Hosts
    from tp_engine.ranks.groups import RankGroups
    from tp_engine.worker.effective_config import EffectiveConfig
    from tp_engine.worker.worker import Worker

logger = get_logger(__name__)

_LAST_WORDS_S = 4.0


class RankSpec(msgspec.Struct, kw_only=True):
    """What rank 0 tells a rank that it starts, as JSON; ``board`` is the address of the job's board."""

    config: dict[str, str | int | float | bool | tuple[str, ...] | None]
    rank: int
    store_host: str
    store_port: int
    parent_pid: int
    board: str


def main() -> int:
    """Join the job and run its plans; the exit code is 0 after the stop plan."""
    ignore_interrupts()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with_parent(spec.parent_pid, grace_s=_LAST_WORDS_S)
    config = EngineConfig(**spec.config)  # type: ignore[arg-type]  # checked by EngineConfig itself
    configure_logging(f"rank {spec.rank}", config.log_format)
    try:
        job = Job.attach(spec.board, RankProgress(fault_injector(spec.rank, configured_faults())), config, spec.rank)
        with job.blaming():
            job.progress.reach(RankPhase.IMPORT)
            from tp_engine.engine.start import serve_own_rank

            serve_own_rank(spec, config, job)
    except Exception:
        logger.exception("rank %d failed", spec.rank)
        sys.stderr.flush()
        os._exit(1)  # at once: the interpreter's normal end could wait for a thread that hangs in a library
    return 0


def run_worker(effective: EffectiveConfig, groups: RankGroups, job: Job, hosts: Hosts | None = None) -> None:
    """Load the model, run each plan until the stop plan, and leave the job.

    ``hosts``: the connections to other hosts, if there are any.
    """
    from tp_engine.worker.worker import Worker

    with contextlib.ExitStack() as stack:
        stack.callback(groups.close)
        stack.enter_context(job.reporting())  # reports before the groups close: a closed group looks like a death
        note_inputs = job.slot.note_inputs if effective.config.check_inputs else None
        worker = Worker(effective, groups, job.slot.tier_progress(), note_inputs=note_inputs)
        stack.callback(worker.close)
        worker.start()
        job.slot.note_memory(worker.memory)
        job.slot.note_startup(worker.startup_s)
        source = _open_source(groups, job, hosts, effective.config)
        stack.callback(source.close)
        subscriber = PlanSubscriber(source, first_step_id=FIRST_STEP_ID)
        job.progress.reach(RankPhase.READY)
        job.ready()
        _run_plans(worker, subscriber, job)
    job.leave()
    job.close()


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
            worker.obey(plan.order)
        else:
            worker.execute(plan)
        recorder.launched(plan.step_id)
        recorder.done(plan.step_id)
