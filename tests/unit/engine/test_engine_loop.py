"""The engine's loop: when it makes plans, and when it calls the other ranks before a plan comes."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.unit.sched.scheduler_harness import EOS, FakeWorker
from tp_engine.engine.engine import Engine
from tp_engine.ipc.rank_slot import StepRecorder
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
        self.entries.append(f"send {plan.step_id}")

    def may_block(self, plan: StepPlan) -> bool:
        return False

    def enter_thread(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> PendingStep:
        self.entries.append(f"run {plan.step_id}")
        result = self._worker.execute(plan)
        return PendingStep(plan=plan, fetch=MagicMock(), token_ids=lambda: result.token_ids)


def make_engine(diary: Any, num_ahead: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine and its scheduler around ``diary``; no processes, no shared memory."""
    for name in ("received", "begin", "launched", "done"):
        monkeypatch.setattr(StepRecorder, name, lambda *_: None)
    return Engine(
        worker=diary,
        scheduler=Scheduler(LIMITS),
        publisher=diary,
        model_info=MagicMock(),
        plan_timeout_s=1.0,
        num_ahead=num_ahead,
        job=MagicMock(),
        echoes=MagicMock(),
        leave=MagicMock(),
    )


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


def test_ranks_are_called_when_they_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: with plans sent ahead, one call per burst: afterwards a plan is in the ring before a rank is idle."""
    diary = Diary()
    engine = make_engine(diary, 1, monkeypatch)
    burst = ["call", "send {0}", "send {1}", "run {0}", "send {2}", "run {1}", "run {2}"]
    for first in (1, 4):
        diary.entries.clear()
        ask(engine, f"request {first}")
        assert run_until_idle(engine) == 3
        assert diary.entries == [entry.format(first, first + 1, first + 2) for entry in burst]


def test_each_plan_is_called_where_none_is_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: with ``--no-async-scheduling``, ranks are idle while a result is entered and while a plan is made."""
    diary = Diary()
    engine = make_engine(diary, 0, monkeypatch)
    ask(engine, "request")
    assert run_until_idle(engine) == 3
    assert diary.entries == [entry for step in (1, 2, 3) for entry in ("call", f"send {step}", f"run {step}", "call")]


def test_an_idle_loop_calls_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a loop without requests leaves the ranks blocked."""
    diary = Diary()
    engine = make_engine(diary, 1, monkeypatch)
    for _ in range(3):
        assert not len(engine.step())
    assert not diary.entries
