"""The life of a rank other than 0, from its process groups to the stop plan."""

from __future__ import annotations

import contextlib

from tp_engine.engine.job import Job
from tp_engine.engine.step_trace import StepTrace
from tp_engine.ipc.plan_channel import PlanSubscriber
from tp_engine.plan import FIRST_STEP_ID, PROFILE_ORDERS, Control
from tp_engine.progress import RankPhase
from tp_engine.ranks.groups import RankGroups
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.worker import Worker


def run_worker(effective: EffectiveConfig, groups: RankGroups, job: Job) -> None:
    """Load, run each plan until the stop plan, and leave."""
    with contextlib.ExitStack() as stack:
        stack.callback(groups.close)
        stack.enter_context(job.reporting())  # before the groups close, which the others take for a death
        worker = Worker(effective, groups, note_inputs=job.slot.note_inputs if effective.config.check_inputs else None)
        stack.callback(worker.close)
        worker.start()
        job.slot.note_memory(worker.memory)
        job.slot.note_startup(worker.startup_s)
        name = groups.host.broadcast_bytes(b"").decode()
        subscriber = PlanSubscriber(name, groups.info.rank - 1, first_step_id=FIRST_STEP_ID, alive=job.alive)
        stack.callback(subscriber.close)
        job.progress.reach(RankPhase.READY)
        job.ready()
        _run_plans(worker, subscriber, job)
    job.leave()
    job.close()


def _run_plans(worker: Worker, subscriber: PlanSubscriber, job: Job) -> None:
    trace = StepTrace(job.slot)
    while True:
        plan = subscriber.receive()
        trace.received(plan, subscriber.last_num_bytes, subscriber.last_checksum)
        if plan.control & Control.STOP:
            job.stopping()
            job.progress.reach(RankPhase.SHUTDOWN)
            return
        trace.begin(plan.step_id)
        if plan.control & PROFILE_ORDERS:
            worker.profile(plan.control)
        else:
            worker.execute(plan)
        trace.launched(plan.step_id)
        trace.done(plan.step_id)
