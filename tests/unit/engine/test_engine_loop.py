"""The engine's loop: when it makes plans, and when it calls the other ranks before a plan comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fake_engine import MODEL_INFO
from tests.unit.sched.scheduler_harness import EOS, FakeWorker
from tp_engine.config import EngineConfig
from tp_engine.engine.engine import Engine
from tp_engine.engine.job import Job
from tp_engine.ipc.job_board import EchoCheck, JobBoard
from tp_engine.job.progress import RankProgress
from tp_engine.plan import StepPlan
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits
from tp_engine.worker.results.readback import PendingStep

LIMITS = SchedulerLimits(num_blocks=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)


class Diary:
    """Stands in for the plan channel and the worker: notes what the engine does, in order."""

    runs_by_itself = False
    last_num_bytes = last_checksum = 0

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._worker = FakeWorker(LIMITS)

    def call(self) -> None:
        self.entries.append("call")

    def publish(self, plan: StepPlan, timeout_s: float) -> None:
        self.entries.append("stop" if plan.control else f"send {plan.step_id}")

    def may_block(self, plan: StepPlan) -> bool:
        return False

    def enter_thread(self) -> None:
        """Nothing depends on the thread."""

    def execute(self, plan: StepPlan) -> PendingStep:
        self.entries.append(f"run {plan.step_id}")
        result = self._worker.execute(plan)
        return PendingStep(plan=plan, fetch=lambda tensors: list, token_ids=lambda: result.token_ids)

    def expert_token_counts(self) -> list[npt.NDArray[np.int64]]:
        return []

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.entries.append("close")

    def leave(self) -> None:
        self.entries.append("leave")


@contextmanager
def running(diary: Any, num_ahead: int) -> Iterator[Engine]:
    """The engine, its scheduler and a job of one rank around ``diary``; no model, no processes."""
    board = JobBoard.create(1)
    config = EngineConfig(flight_recorder_dir="")
    job = Job(board, RankProgress(), config, 0, ends_process=False, same_parent=False)
    engine = Engine(
        worker=diary,
        scheduler=Scheduler(LIMITS),
        publisher=diary,
        model_info=MODEL_INFO,
        plan_timeout_s=1.0,
        num_ahead=num_ahead,
        job=job,
        echoes=EchoCheck(board, checks_inputs=False),
        leave=diary.leave,
    )
    try:
        yield engine
    finally:
        engine.close()
        job.leave()
        job.close()
    assert diary.entries[-4:] == ["stop", "close", "close", "leave"]  # worker and channel are one here


def ask(engine: Engine, request_id: str) -> None:
    """Add a request of three tokens."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, eos_token_ids=(EOS,))
    )


def run_until_idle(engine: Engine) -> int:
    """Step until idle; returns the number of tokens."""
    num_tokens = 0
    for _ in range(20):
        if not engine.has_unfinished:
            return num_tokens
        num_tokens += sum(len(delta.new_token_ids) for delta in engine.step())
    raise AssertionError("the engine did not come to an end")


def test_ranks_are_called_when_they_have_nothing_to_do() -> None:
    """Oracle: with plans sent ahead, one call per burst: afterwards a plan is in the ring before a rank is idle."""
    diary = Diary()
    burst = ["call", "send {0}", "send {1}", "run {0}", "send {2}", "run {1}", "run {2}"]
    with running(diary, 1) as engine:
        for first in (1, 4):
            diary.entries.clear()
            ask(engine, f"request {first}")
            assert run_until_idle(engine) == 3
            assert diary.entries == [entry.format(first, first + 1, first + 2) for entry in burst]


def test_each_plan_is_called_where_none_is_sent_ahead() -> None:
    """Oracle: with ``--no-async-scheduling``, ranks are idle while a result is entered and while a plan is made."""
    diary = Diary()
    with running(diary, 0) as engine:
        ask(engine, "request")
        assert run_until_idle(engine) == 3
        steps = [entry for step in (1, 2, 3) for entry in ("call", f"send {step}", f"run {step}", "call")]
        assert diary.entries == steps


def test_an_idle_loop_calls_no_rank() -> None:
    """Oracle: a loop without requests leaves the ranks blocked."""
    diary = Diary()
    with running(diary, 1) as engine:
        for _ in range(3):
            assert not len(engine.step())
        assert not diary.entries


def test_the_plans_in_flight_run_before_the_ranks_are_stopped() -> None:
    """Oracle: every plan that was sent has run when the stop plan is sent, by hand."""
    diary = Diary()
    with running(diary, 1) as engine:
        ask(engine, "request")
        engine.step()
        assert diary.entries == ["call", "send 1", "send 2", "run 1"]
        diary.entries.clear()
    assert diary.entries == ["run 2", "stop", "close", "close", "leave"]


def test_the_board_has_the_steps_that_ran() -> None:
    """Oracle: the number of plans; what a rank has received and done is what other ranks and operators see."""
    diary = Diary()
    with running(diary, 1) as engine:
        ask(engine, "request")
        run_until_idle(engine)
        assert [rank.num_steps for rank in engine.report().ranks] == [3]
