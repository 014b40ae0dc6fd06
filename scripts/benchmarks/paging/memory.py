"""Measure the share of the KV pool that holds tokens, with blocks and with one reservation of full length per request.

Both ways run this project's scheduler over the same trace, without a model.  A contiguous reservation is one block as
long as the longest possible request::

    paged         | 16 | 16 | 16 | 16 |  ...        a request holds what it has filled, to the next 16 tokens
    contiguous    | max_len tokens       |  ...     a request holds max_len tokens from its first to its last
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tp_engine.plan import StepResult
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

_PER_RESERVATION = 8
_STEP_TOKENS = 256
_MAX_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests that all arrive at once, and a pool of ``num_reservations`` requests of ``max_len`` tokens.

    ``prompt`` and ``output`` are ranges of tokens, both ends included; with ``total`` the output is ``total`` minus the
    prompt.  ``documented`` are the goal's shares of the pool: paged, contiguous.
    """

    name: str
    max_len: int
    num_reservations: int
    prompt: tuple[int, int]
    output: tuple[int, int] = (1, 1)
    total: int | None = None
    documented: tuple[float, float]

    @property
    def pool_tokens(self) -> int:
        """The number of tokens that the pool can hold."""
        return self.num_reservations * self.max_len

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """(prompt, output) tokens of each request; all requests together need several times the pool."""
        rng = np.random.default_rng(seed)
        count = _PER_RESERVATION * self.num_reservations
        prompts = rng.integers(self.prompt[0], self.prompt[1] + 1, count).tolist()
        if self.total is not None:
            return [(prompt, self.total - prompt) for prompt in prompts]
        return list(zip(prompts, rng.integers(self.output[0], self.output[1] + 1, count).tolist(), strict=True))


TRACES = (
    Trace(name="2048 fixed", max_len=2048, num_reservations=16, prompt=(512, 1536), total=2048,
          documented=(0.95, 0.78)),
    Trace(name="average 512", max_len=1024, num_reservations=32, prompt=(64, 448), output=(64, 448),
          documented=(0.92, 0.45)),
    Trace(name="8 sequences", max_len=2048, num_reservations=8, prompt=(128, 1024), output=(128, 1024),
          documented=(0.89, 0.52)),
    Trace(name="8192", max_len=8192, num_reservations=8, prompt=(4096, 6144), output=(512, 2048),
          documented=(0.94, 0.68)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Means over the steps from the first finished request to the last step that left one waiting.

    ``share`` is live tokens over the slots of the pool; ``running`` is the number of requests that held memory.
    """

    share: float
    running: float
    num_steps: int
    num_preemptions: int


def occupancy(trace: Trace, block_size: int, seed: int = 0) -> Occupancy:
    """Serve the trace with blocks of ``block_size`` tokens; blocks of ``trace.max_len`` tokens are reservations."""
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=trace.pool_tokens // block_size,
            block_size=block_size,
            max_num_seqs=_MAX_ROWS,
            max_num_batched_tokens=_STEP_TOKENS + _MAX_ROWS,
            max_model_len=trace.max_len,
            enable_prefix_caching=False,
        )
    )
    requests = trace.lengths(seed)
    for number, (prompt, output) in enumerate(requests):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output)
        scheduler.add(EngineRequest(request_id=str(number), prompt_token_ids=[1] * prompt, params=params))
    shares, running, num_steps = [], [], 0
    while (plan := scheduler.schedule()) is not None:
        tokens = np.ones(len(plan.sampled_rows), dtype=np.int32)
        scheduler.update(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        num_steps += 1
        stats = scheduler.stats()
        if stats.num_waiting and scheduler.num_unfinished < len(requests):
            shares.append(stats.num_live_tokens / trace.pool_tokens)
            running.append(stats.num_running)
    assert shares, f"{trace.name}: no request waited after another had finished"
    return Occupancy(
        share=float(np.mean(shares)),
        running=float(np.mean(running)),
        num_steps=num_steps,
        num_preemptions=scheduler.stats().num_preemptions,
    )


def compare_memory(block_size: int, traces: tuple[Trace, ...] = TRACES) -> list[dict[str, object]]:
    """Measure every trace both ways, with the goal beside it."""
    rows: list[dict[str, object]] = []
    for trace in traces:
        paged, contiguous = occupancy(trace, block_size), occupancy(trace, trace.max_len)
        goal, documented = trace.documented
        rows.append(
            {
                "trace": trace.name,
                "paged": round(paged.share, 4),
                "contiguous": round(contiguous.share, 4),
                "goal": goal,
                "documented_contiguous": documented,
                "running_paged": round(paged.running, 1),
                "running_contiguous": round(contiguous.running, 1),
                "preemptions": paged.num_preemptions,
                "met": paged.share >= goal,
            }
        )
    return rows
