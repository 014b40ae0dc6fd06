"""This project's control plane as a contender: the scheduler over arrays, plans in a fixed layout, the ring."""

from __future__ import annotations

import multiprocessing
from functools import partial

import numpy as np

from benchmarks.control.readers import TIMEOUT_S, Readers, Receive
from tp_engine.ipc.plan_channel import PlanPublisher, PlanSubscriber
from tp_engine.ipc.plan_codec import decode_plan, encode_plan
from tp_engine.ipc.ring_buffer import RingReader
from tp_engine.plan import NO_IDS, IntArray, StepPlan, StepResult
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE = 16
EOS = 151_645
STOPS = (151_643, 151_644)
VOCABULARY = 150_000
NUM_NEW, NEW_LENGTH = 32, 512
LONGEST_FIRST = 160


def open_channel(name: str, first_step_id: int, spin_s: float | None, index: int) -> Receive:
    """Open the channel in a reader's process."""
    subscriber = PlanSubscriber(RingReader(name, index, spin_s=spin_s), first_step_id=first_step_id)
    return partial(subscriber.receive, TIMEOUT_S)


class PlanContender:
    """``num_rows`` requests of 33 to 160 tokens that decode until the benchmark ends, at most ``num_steps`` steps.

    ``spin_s`` is how long a reader spins before it blocks.
    """

    name = "tp_engine"

    def __init__(self, num_readers: int, num_rows: int, num_steps: int, *, spin_s: float | None) -> None:
        self._rng = np.random.default_rng(0)
        self._scheduler = Scheduler(_limits(num_rows, num_steps))
        self._rows: IntArray = NO_IDS
        self._epoch = self._known_epoch = 0
        self._new: list[str] = []
        self._prompts: list[list[int]] = []
        self._add(self._draw(self._rng.integers(33, LONGEST_FIRST + 1, num_rows).tolist()))
        self._reach_steady_decode()
        self._publisher, self.readers = self._start(num_readers, spin_s)
        self._publisher.wait_attached(TIMEOUT_S)
        self.readers.wait_ready()

    def _start(self, num_readers: int, spin_s: float | None) -> tuple[PlanPublisher, Readers]:
        publisher = PlanPublisher(num_readers)
        arguments = (publisher.name, self._scheduler.next_step_id, spin_s)
        return publisher, Readers(multiprocessing.get_context("spawn"), num_readers, open_channel, arguments)

    def draw(self) -> None:
        self._prompts = self._draw([NEW_LENGTH] * NUM_NEW)

    def admit(self) -> None:
        self._new = self._add(self._prompts)

    def schedule(self) -> StepPlan:
        self._publisher.call()
        plan = self._scheduler.schedule()
        assert plan is not None and len(plan.admitted) == len(self._new)
        return plan

    def publish(self, step: StepPlan) -> None:
        self._publisher.publish(step, TIMEOUT_S)
        self._known_epoch, self._epoch, self._rows = self._epoch, step.rows_epoch, step.decode_rows

    def encode(self, step: StepPlan) -> bytes | bytearray:
        return encode_plan(step, self._known_epoch)

    def decode(self, data: bytes | bytearray) -> None:
        decode_plan(data, self._epoch, self._rows)

    def sample(self, step: StepPlan) -> StepResult:
        tokens = self._rng.integers(0, VOCABULARY, len(step.sampled_rows), dtype=np.int32)
        return StepResult(step_id=step.step_id, token_ids=tokens)

    def update(self, step: StepPlan, tokens: StepResult) -> object:
        self._publisher.call()
        return self._scheduler.update(step, tokens)

    def retire(self) -> None:
        self._scheduler.abort(self._new)
        self._new = []

    def close(self) -> None:
        """End the readers and unmap the ring."""
        self.readers.close()
        self._publisher.close()

    def _draw(self, lengths: list[int]) -> list[list[int]]:
        return [self._rng.integers(0, VOCABULARY, length).tolist() for length in lengths]

    def _add(self, prompts: list[list[int]]) -> list[str]:
        """Add requests of different priorities."""
        params = SamplingParams(max_tokens=None, stop_token_ids=list(STOPS))
        names = [f"{self._scheduler.next_step_id}-{number}" for number in range(len(prompts))]
        for number, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=names[number],
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(EOS,),
                priority=number % 3,
            )
            self._scheduler.add(request)
        return names

    def _reach_steady_decode(self) -> None:
        while (plan := self._scheduler.schedule()) is not None:
            self._scheduler.update(plan, self.sample(plan))
            if not len(plan.prefill_rows) and not self._scheduler.stats().num_waiting:
                return


def _limits(num_rows: int, num_steps: int) -> SchedulerLimits:
    """Limits that never preempt a row and that let a mixed step take all its prompts whole."""
    longest = max(LONGEST_FIRST + 2 * num_steps, NEW_LENGTH) + 64
    blocks_per_row = -(-longest // BLOCK_SIZE) + 1
    return SchedulerLimits(
        num_blocks=num_rows * blocks_per_row + 2 * NUM_NEW * (NEW_LENGTH // BLOCK_SIZE + 2) + 64,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows + NUM_NEW,
        max_num_batched_tokens=num_rows + NUM_NEW * NEW_LENGTH,
        max_model_len=longest,
    )
