"""``tp-engine serve`` with an engine that computes nothing, to measure the frontend's cost.

    python -m tp_engine.apps.bench.serving.fake_server --port 8000 --step-ms 20 --max-num-seqs 1000

Every running request gets one token per step of ``--step-ms`` (0: no wait).  The tokenizer is the demo model's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import Distribution, EngineReport
from tp_engine.options import Options
from tp_engine.options.fields import option
from tp_engine.options.launch import run_launched
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta, StepOutput
from tp_engine.sched.view import SchedulerStats, ViewLimits
from tp_engine.server import lifecycle
from tp_engine.server.config import ServerConfig

_TEXT = b"The quick brown fox jumps over the lazy dog. "  # one token per byte


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """The options of the fake engine."""

    step_ms: float = option(0.0, "time from one token of a request to its next; 0: as fast as it can")


class InstantEngine:
    """Answers every request with the bytes of one text, over and over; sequences end by length."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = 0.0
        self._left: dict[str, int] = {}  # request id -> number of tokens still to send
        self._num_steps = 0
        self.model_info = ModelInfo(
            model=str(DEMO_MODEL), tokenizer=str(DEMO_MODEL), max_model_len=1 << 20, vocab_size=263,
            eos_token_ids=(258,), block_size=16, num_blocks=1 << 20, tensor_parallel_size=1, dtype="float32",
            device="none", max_num_seqs=config.max_num_seqs, max_logprobs=0,
        )  # fmt: skip

    @property
    def has_unfinished(self) -> bool:
        """Whether a request runs."""
        return bool(self._left)

    def add_request(self, request: EngineRequest) -> None:
        """One sequence per request, whatever its ``n``."""
        self._left[request.request_id] = request.params.max_tokens or 1

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        """End requests."""
        return [
            SequenceDelta(request_id=one, index=0, new_token_ids=[], finish_reason=FinishReason.ABORT)
            for one in request_ids
            if self._left.pop(one, None)
        ]

    def step(self) -> StepOutput:
        """One token for each running request; the last one also has the reason of the end."""
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = max(self._next_s + self._step_s, time.monotonic())
        self._num_steps += 1
        token_id = _TEXT[self._num_steps % len(_TEXT)]
        ending = [one for one, left in self._left.items() if left == 1]
        deltas = [
            SequenceDelta(request_id=one, index=0, new_token_ids=[token_id], finish_reason=FinishReason.LENGTH)
            for one in ending
        ]
        for one in ending:
            del self._left[one]
        names = list(self._left)
        for one in names:
            self._left[one] -= 1
        return StepOutput(request_ids=names, indices=[0] * len(names), token_ids=[token_id] * len(names), deltas=deltas)

    def stats(self) -> SchedulerStats:
        """Only the number of running requests is real."""
        return SchedulerStats(
            num_running=len(self._left), num_waiting=0, num_free_blocks=1, num_cached_blocks=0, num_used_blocks=0,
            num_live_tokens=0, fragmentation=0.0, num_prefix_query_tokens=0, num_prefix_hit_tokens=0,
            num_preemptions=0, num_recomputed_tokens=0,
        )  # fmt: skip

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """No ranks, no pool."""
        none = Distribution(counts=[0], total=0.0)
        return EngineReport(
            stats=self.stats(),
            ranks=[],
            step_tokens=none,
            plan_bytes=none,
            step_skew=none,
            num_missed_steps=0,
            view=None,
        )

    def run_background_io(self) -> bool:
        """There is none."""
        return False

    def check_health(self) -> None:
        """The engine is always healthy."""

    def close(self) -> None:
        """Nothing to free."""


def job(options: Options) -> int:
    """Serve until told to stop."""
    step_s = options.build("fake", FakeConfig).step_ms / 1e3
    start: Any = lambda config, **_: InstantEngine(config, step_s)  # noqa: E731
    lifecycle.start_engine = start
    return lifecycle.serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))


if __name__ == "__main__":
    tables = {"engine": EngineConfig, "server": ServerConfig, "fake": FakeConfig}
    sys.exit(run_launched("fake_server.py", __doc__ or "", tables, job))
