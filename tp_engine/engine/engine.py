"""Rank 0's loop: schedule -> publish -> run -> update.

With ``num_ahead`` = 1 the plan of the next step is in the ring before this step runs, so no rank waits for rank 0
between two steps; the sampled tokens reach the next step on the devices::

    rank 0    plan 1  plan 2 | run 1 | update 1  plan 3 | run 2 | update 2  plan 4 | run 3 | ...
    rank 1                   | run 1 |                  | run 2 |                  | run 3 | ...

On a device that runs by itself (CUDA), the host launches the next step before it waits for the result of this one::

    host      launch 1  launch 2  wait 1  update 1  plan 3  launch 3  wait 2  update 2 ...
    device    | run 1          | run 2                    | run 3                      ...
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tp_engine.engine.admin import EngineAdmin
from tp_engine.engine.feature import EngineFeature, EngineHooks
from tp_engine.engine.job import Job
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport, StepStatistics, expert_balance
from tp_engine.ipc.job_board import EchoCheck
from tp_engine.ipc.plan_channel import PlanPublisher
from tp_engine.ipc.rank_slot import StepRecorder
from tp_engine.job.progress import RankPhase
from tp_engine.plan import Control, StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, SequenceDelta, StepOutput
from tp_engine.sched.scheduler import Scheduler
from tp_engine.sched.view import SchedulerStats, ViewLimits
from tp_engine.system.closing import Ending
from tp_engine.worker.orders import Outcome
from tp_engine.worker.results.readback import PendingStep
from tp_engine.worker.worker import Worker


class Engine:
    """Rank 0's engine: owns the scheduler, the plan channel and the worker of its own device.

    ``num_ahead`` plans are sent before the oldest step runs.  ``job`` watches the other ranks; ``echoes`` compares what
    they received.  ``leave`` is called once, after the stop plan, and waits for the other ranks to end.
    ``features`` are what stands beside the engine.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        scheduler: Scheduler,
        publisher: PlanPublisher | None,
        model_info: ModelInfo,
        plan_timeout_s: float,
        num_ahead: int,
        job: Job,
        echoes: EchoCheck,
        leave: Callable[[], None],
        features: Sequence[EngineFeature] = (),
    ) -> None:
        self.model_info, self.worker, self.scheduler = model_info, worker, scheduler
        self._publisher, self._plan_timeout_s, self._num_ahead = publisher, plan_timeout_s, num_ahead
        self._held: StepPlan | None = None
        self._sent: deque[StepPlan] = deque()
        self._launched: deque[PendingStep] = deque()
        self._num_in_flight = 0  # steps whose plans have been made and whose results have not been taken yet
        self._job = job
        self._recorder = StepRecorder(job.slot)
        self._statistics = StepStatistics(job.board)
        self._echoes, self._leave = echoes, leave
        self._features, self._hooks = features, EngineHooks()
        for feature in features:
            feature.attach(self._hooks, scheduler)
        self._ending = Ending()
        self._admin = EngineAdmin(
            scheduler=scheduler,
            forget=self._hooks.forget,
            worker=worker,
            job=job,
            standstill=self._standing_still,
            execute_command=self._execute_command,
        )

    @property
    def operator(self) -> EngineAdmin:
        """What an operator may do between two steps; ``EngineDeadError`` if the engine has ended."""
        self._enter()
        return self._admin

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do: a request, a plan whose step has not ended, or output to take."""
        has_requests = self.scheduler.has_unfinished and not self._admin.is_paused
        return has_requests or self._num_in_flight > 0 or bool(self._admin.drained)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; a ``RequestError`` leaves the engine unchanged."""
        self._enter()
        if not any(add(request) for add in self._hooks.add):
            self.scheduler.add(request)

    def compile_grammars(self) -> list[SequenceDelta]:
        """Wait until no request waits for its grammar; returns the last deltas of those whose grammars failed."""
        self._enter()
        with self._failing():
            return [delta for settle_all in self._hooks.settle_all for delta in settle_all(self._job.check)]

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        """End requests now; unknown ids are ignored."""
        request_ids = list(request_ids)
        for forget in self._hooks.forget:
            forget(request_ids)
        return self.scheduler.abort(request_ids)

    def prefetch_session(self, session: str, salt: str) -> None:
        self.scheduler.prefetch_session(session, salt)

    def step(self) -> StepOutput:
        """Run one step on all ranks and return its output, which is empty if there is nothing to do.  If all requests
        wait for their grammars or for a feature, this waits a few milliseconds at most."""
        self._enter()
        if self._admin.drained:
            return self._admin.drained.popleft()
        try:  # not ``_failing``, which costs a generator for each step
            for settle in self._hooks.settle:
                if failed := settle():
                    return StepOutput(deltas=failed)
            self._send_plans()
            if self._num_in_flight == 0:
                for idle in self._hooks.idle:
                    idle()
                return StepOutput()
            plan, result = self._finish_oldest()
            if self._num_ahead == 0:
                self._call_ranks()
            return self._update(plan, result)
        except BaseException as error:
            self._fail(error)
            raise

    def stats(self) -> SchedulerStats:
        """Requests, blocks and counters now."""
        return self.scheduler.stats()

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """Return the scheduler and every rank's steps and memory; with ``view`` also the pool and the running
        sequences. This costs a fraction of a millisecond; steps pay nothing, because they record their times anyway.
        For a model with experts on a GPU it waits for the launched steps, whose counts are on the device."""
        self.worker.enter_thread()
        shown = None if view is None else self.scheduler.view(view)
        experts = expert_balance(self.worker.expert_token_counts())
        return self._statistics.report(self.scheduler.stats(), shown, experts=experts, **self.worker.report())

    def memory_growth_bytes(self) -> int:
        """Bytes of device memory that rank 0 has taken since it became ready, without the KV cache."""
        return self.worker.memory_growth_bytes()

    def check_health(self) -> None:
        """Raise ``RankError`` if a rank has died; cheap enough for each round of an idle loop."""
        self._job.check()

    def run_background_io(self) -> bool:
        """Continue what features have put off, such as writes, while no request runs; return whether there is more."""
        if not self._hooks.turn or self.has_unfinished:
            return False
        self._enter()
        with self._failing():
            return any(turn(self._run_alone) for turn in self._hooks.turn)

    def check_integrity(self) -> None:
        """Assert that all blocks are accounted for."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Stop all ranks and leave; safe to call twice, and after a failure."""
        if not self._ending.close():
            return
        self.worker.enter_thread()
        try:
            if self._ending.failure is None:
                self._stop_ranks()
        finally:
            for feature in self._features:
                feature.close()
            self.worker.close()
            if self._publisher is not None:
                self._publisher.close()
            self._leave()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A context in which an error ends the engine, and is attributed to the rank that caused it."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._ending.failure = error
        self._job.record_failure(error)

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """A context in which no step is in flight; an error in it ends the engine."""
        self._enter()
        with self._failing():
            self._admin.drained.extend(self._drain())
            yield

    def _execute_command(self, plan: StepPlan) -> Outcome:
        self._publish(plan)
        self._recorder.begin(plan.step_id)
        outcome = self.worker.execute_command(plan.order)
        self._recorder.done(plan.step_id)
        return outcome

    def _drain(self) -> Iterator[StepOutput]:
        """Run the plans in flight."""
        while self._num_in_flight:
            self._send_held()
            yield self._update(*self._finish_oldest())

    def _update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        output = self.scheduler.update(plan, result)
        if self._admin.weight_version:
            output.weight_version = self._admin.weight_version
        return output

    def _stop_ranks(self) -> None:
        """Run the plans in flight, then send the stop plan."""
        with self._failing():
            for _ in self._drain():
                pass
            for flush in self._hooks.flush:
                flush(self._run_alone)
            self._job.stopping()
            self._job.progress.reach(RankPhase.SHUTDOWN)
            self._publish(StepPlan(step_id=self.scheduler.next_step_id, control=Control.STOP))

    def _run_alone(self, plan: StepPlan) -> None:
        """Run a plan without rows, while no step is in flight."""
        self._num_in_flight += 1
        self._send(plan)
        self.scheduler.update(*self._finish_oldest())

    def _send_plans(self) -> None:
        """Make and send plans, up to ``num_ahead`` ahead.  A plan that may not fit into the ring is held back until no
        step is in flight: ranks that run a step do not read the ring, and could not end the step while rank 0 waits for
        room."""
        self._send_held()
        if self._admin.is_paused:
            return
        self._call_ranks()
        while self._num_in_flight <= self._num_ahead and (plan := self.scheduler.schedule()) is not None:
            self._num_in_flight += 1
            if self._num_in_flight > 1 and self._publisher is not None and self._publisher.may_block(plan):
                self._held = plan
                return
            self._send(plan)

    def _call_ranks(self) -> None:
        """Wake idle ranks now, so that they wake up while rank 0 makes the next plan."""
        if self._publisher is not None and self._num_in_flight == 0 and self.scheduler.has_unfinished:
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
        while self._sent and (not self._launched or self.worker.runs_by_itself):
            plan = self._sent.popleft()
            self._recorder.begin(plan.step_id)
            self._launched.append(self.worker.execute(plan))
            self._recorder.launched(plan.step_id)
        step = self._launched.popleft()
        self._num_in_flight -= 1
        result = step.result()
        if len(result.token_ids):
            self._echoes.check(result.step_id)
        self._recorder.done(result.step_id)
        return step.plan, result

    def _publish(self, plan: StepPlan) -> None:
        num_bytes = checksum = 0
        if self._publisher is not None:
            self._publisher.publish(plan, timeout_s=self._plan_timeout_s)
            num_bytes, checksum = self._publisher.last_num_bytes, self._publisher.last_checksum
        self._recorder.received(plan, num_bytes, checksum)

    def _enter(self) -> None:
        """Prepare the calling thread; ``EngineDeadError`` if the engine has ended."""
        self._ending.check()
        self.worker.enter_thread()
