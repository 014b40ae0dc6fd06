"""Rank 0's own time per step, without a model: schedule, encode and update, decoding and admitting prompts.

Chunked prefill, prefix cache, priorities and stop checks are on.  ``update`` is measured whole and, as ``apply``,
without the records that it makes for the engine's caller.  Ends with one JSON line; all times are microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from tp_engine.ipc.plan_codec import encode_plan
from tp_engine.plan import StepPlan, StepResult
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE = 16
EOS = 151_645
VOCABULARY = 150_000


def make_scheduler(num_rows: int, max_tokens: int) -> Scheduler:
    """Room enough that no row is ever preempted."""
    blocks_per_row = -(-max_tokens // BLOCK_SIZE) + 1
    limits = SchedulerLimits(
        num_blocks=num_rows * blocks_per_row + 64,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows + 32_768,
        max_model_len=max_tokens,
    )
    return Scheduler(limits)


def add_requests(scheduler: Scheduler, lengths: list[int], rng: np.random.Generator) -> None:
    """Requests of random tokens that run until the benchmark ends; priorities vary."""
    params = SamplingParams(max_tokens=None, stop_token_ids=[151_643, 151_644])
    for number, length in enumerate(lengths):
        prompt = rng.integers(0, VOCABULARY, length).tolist()
        request_id = f"{scheduler.next_step_id}-{number}"
        scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(EOS,),
                priority=number % 3,
            )
        )


class Clock:
    """Times of named phases in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.num_bytes: list[int] = []

    def run(self, name: str, call: Callable[[], object]) -> object:
        """Call, and keep how long it took."""
        start = time.perf_counter_ns()
        value = call()
        self.times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
        return value

    def percentiles(self) -> dict[str, float]:
        """p50 and p99 of each phase, and the largest plan in bytes."""
        percentiles = {
            f"{name}_p{percent}_us": round(float(np.percentile(times, percent)), 1)
            for name, times in self.times.items()
            for percent in (50, 99)
        }
        return {**percentiles, "largest_plan_bytes": max(self.num_bytes)}


def step(scheduler: Scheduler, clock: Clock, rng: np.random.Generator, finish: str) -> StepPlan:
    """One step with random tokens; ``finish`` is the method that takes the result in."""
    plan = clock.run("schedule", scheduler.schedule)
    assert isinstance(plan, StepPlan)
    message = clock.run("encode", lambda: encode_plan(plan))
    assert isinstance(message, bytes)
    clock.num_bytes.append(len(message))
    tokens = rng.integers(0, VOCABULARY, len(plan.sampled_rows), dtype=np.int32)
    result = StepResult(step_id=plan.step_id, token_ids=tokens)
    clock.run(finish, lambda: getattr(scheduler, finish)(plan, result))
    return plan


def reach_steady_decode(scheduler: Scheduler, rng: np.random.Generator) -> None:
    """Step until nobody waits and no prompt is being computed."""
    clock = Clock()
    while len(step(scheduler, clock, rng, "update").prefill_rows) or scheduler.stats().num_waiting:
        pass


def bench_decode(num_rows: int, num_steps: int) -> dict[str, float]:
    """All rows decode; prompts of 33 to 160 tokens, so that the rows reach the ends of their blocks in turn."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_rows, 256 + 2 * num_steps)
    add_requests(scheduler, rng.integers(33, 161, num_rows).tolist(), rng)
    reach_steady_decode(scheduler, rng)
    clock = Clock()
    for number in range(num_steps):
        plan = step(scheduler, clock, rng, "apply" if number % 2 else "update")
        assert len(plan.decode_rows) == num_rows
    return clock.percentiles()


def bench_mixed(num_rounds: int) -> dict[str, float]:
    """256 rows decode and 32 prompts of 512 tokens enter, whole, in one step."""
    clock = Clock()
    for number in range(num_rounds):
        rng = np.random.default_rng(number)
        scheduler = make_scheduler(288, 1024)
        add_requests(scheduler, rng.integers(33, 161, 256).tolist(), rng)
        reach_steady_decode(scheduler, rng)
        clock.run("add", lambda s=scheduler, r=rng: add_requests(s, [512] * 32, r))
        plan = step(scheduler, clock, rng, "update")
        assert len(plan.admitted) == 32 and plan.num_tokens == 256 + 32 * 512
    return clock.percentiles()


def main() -> None:
    """Print a table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="decode steps per batch size")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the mixed step")
    options = parser.parse_args()
    results = {f"decode_{rows}": bench_decode(rows, options.steps) for rows in (32, 256, 1024)}
    results["mixed_32x512"] = bench_mixed(options.rounds)
    for name, values in results.items():
        print(f"{name:>14}  " + "  ".join(f"{key} {value:,.1f}" for key, value in values.items()))
    print(json.dumps({"benchmark": "scheduler", "block_size": BLOCK_SIZE, **results}))


if __name__ == "__main__":
    main()
