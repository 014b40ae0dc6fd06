"""Rank 0's loop: schedule -> publish -> run -> update.

With ``num_ahead`` = 1 the plan of the next step is in the ring before this step runs, so no rank waits for rank 0
between two steps; the sampled tokens reach the next step on the devices::

    rank 0    plan 1  plan 2 | run 1 | update 1  plan 3 | run 2 | update 2  plan 4 | run 3 | ...
    rank 1                   | run 1 |                  | run 2 |                  | run 3 | ...

On a device that runs by itself (CUDA), the host launches the next step before it waits for the result of this one::

    host      launch 1  launch 2  wait 1  update 1  plan 3  launch 3  wait 2  update 2 ...
    device    | run 1          | run 2                    | run 3                      ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tp_engine.engine.disk_upkeep import DiskUpkeep
from tp_engine.engine.grammar_queue import GrammarQueue
from tp_engine.engine.job import Job
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport, StepStatistics, expert_balance
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.ipc.job_board import EchoCheck
from tp_engine.ipc.plan_channel import PlanPublisher
from tp_engine.ipc.rank_slot import StepRecorder
from tp_engine.plan import Control, Order, StepPlan, StepResult
from tp_engine.progress import RankPhase
from tp_engine.request import EngineRequest, SequenceDelta, StepOutput
from tp_engine.sched.scheduler import Scheduler
from tp_engine.sched.view import SchedulerStats, ViewLimits
from tp_engine.worker.model_runner import PendingStep
from tp_engine.worker.worker import Worker

_COMPILING_SLICE_S = 0.005


class Engine:
    """Rank 0's engine: owns the scheduler, the plan channel and the worker of its own device.

    ``num_ahead`` plans are sent before the oldest step runs.  ``job`` watches the other ranks; ``echoes`` compares what
    they received.  ``leave`` is called once, after the stop plan, and waits for the other ranks to end.  ``upkeep`` is
    that of a disk tier.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        scheduler: Scheduler,
        grammars: GrammarQueue,
        publisher: PlanPublisher | None,
        model_info: ModelInfo,
        plan_timeout_s: float,
        num_ahead: int,
        job: Job,
        echoes: EchoCheck,
        leave: Callable[[], None],
        upkeep: DiskUpkeep | None = None,
    ) -> None:
        self.model_info = model_info
        self._worker = worker
        self._scheduler = scheduler
        self._grammars = grammars
        self._publisher = publisher
        self._plan_timeout_s = plan_timeout_s
        self._num_ahead = num_ahead
        self._held: StepPlan | None = None
        self._sent: deque[StepPlan] = deque()
        self._launched: deque[tuple[StepPlan, PendingStep]] = deque()
        self._drained: deque[StepOutput] = deque()
        self._job = job
        self._recorder = StepRecorder(job.slot)
        self._statistics = StepStatistics(job.board)
        self._echoes = echoes
        self._leave = leave
        self._upkeep = upkeep
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or a plan was made whose step has not ended."""
        return self._scheduler.has_unfinished or self._num_in_flight > 0 or bool(self._drained)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; a ``RequestError`` leaves the engine unchanged."""
        self._check_alive()
        if not request.is_constrained:
            self._scheduler.add(request)
        else:
            self._grammars.add(request, self._scheduler)

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        """End requests now; unknown ids are ignored."""
        request_ids = list(request_ids)
        self._grammars.forget(request_ids)
        return self._scheduler.abort(request_ids)

    def expect(self, session: str, salt: str) -> None:
        """See ``Scheduler.expect``."""
        self._scheduler.expect(session, salt)

    def step(self) -> StepOutput:
        """Run one step on all ranks and return its output, which is empty if there is nothing to do.

        If all requests wait for their grammars or for the disk tier, this waits a few milliseconds at most.
        """
        self._check_alive()
        if self._drained:
            return self._drained.popleft()
        try:
            if failed := self._grammars.settle(self._scheduler):
                return StepOutput(deltas=failed)
            self._send_plans()
            if self._num_in_flight == 0:
                self._grammars.wait(_COMPILING_SLICE_S)
                if self._upkeep is not None:
                    self._upkeep.wait()
                return StepOutput()
            plan, result = self._finish_oldest()
            if self._num_ahead == 0:
                self._call_ranks()
            return self._scheduler.update(plan, result)
        except BaseException as error:
            self._failure = error
            self._job.blame(error)
            raise

    def stats(self) -> SchedulerStats:
        """Requests, blocks and counters now."""
        return self._scheduler.stats()

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """The scheduler and every rank's steps and memory; with ``view`` also the pool and the running sequences.

        This costs a fraction of a millisecond; steps pay nothing, because they record their times anyway.  For a
        model with experts on a GPU it waits for the launched steps, whose counts are on the device.
        """
        self._statistics.update()
        return EngineReport(
            stats=self._scheduler.stats(),
            ranks=self._statistics.rank_reports(),
            step_tokens=self._statistics.step_tokens.distribution(),
            plan_bytes=self._statistics.plan_bytes.distribution(),
            step_skew=self._statistics.step_skew.distribution(),
            num_missed_steps=self._statistics.num_missed,
            experts=expert_balance(self._worker.expert_token_counts()),
            moves=self._worker.moves(),
            disk_moves=self._worker.disk_moves(),
            view=None if view is None else self._scheduler.view(view),
        )

    def memory_growth_bytes(self) -> int:
        """Bytes of device memory that rank 0 has taken since it became ready, without the KV cache."""
        return self._worker.memory_growth_bytes()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False if requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def order(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Let all ranks follow an order (``worker/orders.py``) when nothing is in flight; what rank 0 made of it.

        ``RequestError`` if a rank can not: then nothing has changed on any.  ``drained`` has the output of the steps
        that were in flight.
        """
        self._check_alive()
        try:
            while self._num_in_flight:
                self._drained.append(self._scheduler.update(*self._finish_oldest()))
            order = msgspec.json.encode(Order(kind, dict(arguments)))
            plan = StepPlan(step_id=self._scheduler.skip_step(), order=order)
            self._publish(plan)
            self._recorder.begin(plan.step_id)
            outcome = self._worker.obey(order)
            self._recorder.done(plan.step_id)
            self._job.wait_step(plan.step_id, timeout_s=self.configuration()["startup_timeout_s"])
        except BaseException as error:
            self._failure = error
            self._job.blame(error)
            raise
        if outcome.refusal:
            raise RequestError(outcome.refusal)
        return outcome.result

    def drained(self) -> list[StepOutput]:
        """Take the output of steps that an order waited for; else the next ``step`` gives it."""
        outputs = [*self._drained]
        self._drained.clear()
        return outputs

    def configuration(self) -> dict[str, Any]:
        """The effective configuration, by field."""
        return self._worker.configuration

    def check_health(self) -> None:
        """Raise ``RankError`` if a rank has died; cheap enough for each round of an idle loop."""
        self._job.check()

    def work_when_idle(self) -> bool:
        """For idle loops: go on with what no request waits for, the writes of a disk tier; whether there is more."""
        if self._upkeep is None or self.has_unfinished:
            return False
        self._check_alive()
        try:
            return self._upkeep.turn(self._run_alone)
        except BaseException as error:
            self._failure = error
            self._job.blame(error)
            raise

    def check_integrity(self) -> None:
        """Assert that all blocks are accounted for."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Stop all ranks and leave; safe to call twice, and after a failure."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failure is None:
                self._stop_ranks()
        finally:
            self._grammars.close()
            if self._upkeep is not None:
                self._upkeep.close()
            self._worker.close()
            if self._publisher is not None:
                self._publisher.close()
            self._leave()

    def _stop_ranks(self) -> None:
        """Run the plans in flight, then send the stop plan."""
        try:
            while self._num_in_flight:
                self._scheduler.update(*self._finish_oldest())
            if self._upkeep is not None:
                self._upkeep.flush(self._run_alone)
            self._job.stopping()
            self._job.progress.reach(RankPhase.SHUTDOWN)
            self._publish(StepPlan(step_id=self._scheduler.next_step_id, control=Control.STOP))
        except BaseException as error:
            self._failure = error
            self._job.blame(error)
            raise

    def _run_alone(self, plan: StepPlan) -> None:
        """Run a plan without rows, while no step is in flight."""
        self._send(plan)
        self._scheduler.update(*self._finish_oldest())

    @property
    def _num_in_flight(self) -> int:
        """Steps whose plans have been made and whose results have not been taken yet."""
        return len(self._sent) + len(self._launched) + (self._held is not None)

    def _send_plans(self) -> None:
        """Make and send plans, up to ``num_ahead`` ahead.

        A plan that may not fit into the ring is held back until no step is in flight: ranks that run a step do not read
        the ring, and could not end the step while rank 0 waits for room.
        """
        self._send_held()
        self._call_ranks()
        while self._num_in_flight <= self._num_ahead and (plan := self._scheduler.schedule()) is not None:
            if self._num_in_flight and self._publisher is not None and self._publisher.may_block(plan):
                self._held = plan
                return
            self._send(plan)

    def _call_ranks(self) -> None:
        """Wake idle ranks now, so that they wake up while rank 0 makes the next plan."""
        if self._num_in_flight == 0 and self._scheduler.has_unfinished and self._publisher is not None:
            self._publisher.call()

    def _send_held(self) -> None:
        if self._held is not None and not (self._sent or self._launched):
            plan, self._held = self._held, None
            self._send(plan)

    def _send(self, plan: StepPlan) -> None:
        self._publish(plan)
        self._sent.append(plan)

    def _finish_oldest(self) -> tuple[StepPlan, StepResult]:
        """Run the oldest plan on this rank, as the other ranks do, and wait for its result."""
        self._send_held()
        while self._sent and (self._worker.runs_by_itself or not self._launched):
            self._launch(self._sent.popleft())
        plan, pending = self._launched.popleft()
        result = pending.result()
        if len(result.token_ids):
            self._echoes.check(plan.step_id)
        self._recorder.done(plan.step_id)
        return plan, result

    def _launch(self, plan: StepPlan) -> None:
        self._recorder.begin(plan.step_id)
        self._launched.append((plan, self._worker.execute(plan)))
        self._recorder.launched(plan.step_id)

    def _publish(self, plan: StepPlan) -> None:
        num_bytes = checksum = 0
        if self._publisher is not None:
            self._publisher.publish(plan, timeout_s=self._plan_timeout_s)
            num_bytes, checksum = self._publisher.last_num_bytes, self._publisher.last_checksum
        self._recorder.received(plan, num_bytes, checksum)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine stopped after an error: {self._failure}") from self._failure
        if self._closed:
            raise EngineDeadError("the engine is closed")
