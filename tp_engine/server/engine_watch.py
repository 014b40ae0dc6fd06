"""How the frontend watches the engine: a report on request, and a bounded history with one sample per second.

An idle engine is not asked: while no request is in flight, each second repeats the last sample.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.openai.errors import HttpError
from tp_engine.engine.report import EngineReport
from tp_engine.errors import EngineDeadError
from tp_engine.model_config.block_size import advise_measured
from tp_engine.sched.view import SchedulerStats, ViewLimits
from tp_engine.server.metrics.figures import RequestFigures
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

INTERVAL_S = 1.0
MAX_SAMPLES = 600
_REPORT_TIMEOUT_S = 2.0
_VIEW_LIFE_S = 0.2
_LOG_EVERY_S = 10.0
ADVISE_AFTER = 100  # fewer sequences say little about later ones
_UNREACHABLE = (HttpError, EngineDeadError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSample:
    """One second: ``time_s`` (``time.monotonic()``) is its end; rates are per second since the previous sample."""

    time_s: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    stats: SchedulerStats

    @property
    def is_active(self) -> bool:
        """Whether a request ran or waited."""
        stats = self.stats
        return bool(stats.num_running or stats.num_waiting or self.prompt_tokens_per_s or self.generation_tokens_per_s)


class EngineWatch:
    """Asks the engine and keeps what it reports; for the event loop's thread alone.

    ``engine`` returns the engine, or raises ``HttpError``.  ``logs``: log the throughput every ten seconds of work, and
    what the block size wastes once ``ADVISE_AFTER`` sequences have finished.
    """

    def __init__(self, engine: Callable[[], AsyncLLM], figures: RequestFigures, *, logs: bool) -> None:
        self._engine = engine
        self._figures = figures
        self._logs = logs
        self.history: deque[TrafficSample] = deque(maxlen=MAX_SAMPLES)
        self._seen_tokens = (0, 0)
        self._seen_s = time.monotonic()
        self._next_log_s = 0.0
        self._has_advised = False
        self._viewing: asyncio.Task[EngineReport] | None = None
        self._viewed_s = 0.0

    @property
    def peak_usage(self) -> float:
        """The largest share (0 to 1) of the pool's blocks that running requests held, among the samples kept."""
        return max((sample.stats.usage for sample in self.history), default=0.0)

    async def report(self) -> EngineReport:
        """Ask rank 0.  Raises ``HttpError`` or ``EngineDeadError`` without an engine, ``TimeoutError`` if it hangs."""
        return await self._ask(None)

    async def view(self) -> EngineReport:
        """A report with the pool and the running sequences, at most a fifth of a second old.

        Concurrent callers share one request to the engine.
        """
        if self._viewing is None or time.monotonic() - self._viewed_s > _VIEW_LIFE_S:
            self._viewed_s = time.monotonic()
            self._viewing = asyncio.get_running_loop().create_task(self._ask(ViewLimits()))
            self._viewing.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # marks the error as seen if all clients left
        return await asyncio.shield(self._viewing)

    async def run(self) -> None:
        """Take a sample every second, forever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._is_idle():
                self._keep(self.history[-1].stats)
                continue
            try:
                await self.report()
                if not self._has_advised and self._figures.lengths.num_requests >= ADVISE_AFTER:
                    self.log_block_size(self._engine().model_info.block_size)
                    self._has_advised = True
            except _UNREACHABLE:
                continue
            self._log()

    def log_block_size(self, block_size: int) -> None:
        """Log what blocks of ``block_size`` have wasted on ``ADVISE_AFTER`` or more finished requests, and the best
        size."""
        lengths = self._figures.lengths
        if self._logs and lengths.num_requests >= ADVISE_AFTER:
            logger.info("%s", advise_measured(lengths.lengths(block_size)))

    def _is_idle(self) -> bool:
        if not self.history or self._tokens() != self._seen_tokens:
            return False
        last = self.history[-1].stats
        try:
            return last.num_running == last.num_waiting == self._engine().num_unfinished == 0
        except _UNREACHABLE:
            return False

    async def _ask(self, limits: ViewLimits | None) -> EngineReport:
        report = await self._engine().report(limits, timeout_s=_REPORT_TIMEOUT_S)
        self._keep(report.stats)
        return report

    def _tokens(self) -> tuple[int, int]:
        return self._figures.num_prompt_tokens, self._figures.num_generation_tokens

    def _keep(self, stats: SchedulerStats) -> None:
        """Keep a sample, unless the last one is less than a second old."""
        now_s = time.monotonic()
        seconds = now_s - self._seen_s
        if self.history and seconds < 0.9 * INTERVAL_S:
            return
        tokens = self._tokens()
        prompt_rate, generation_rate = (
            (now - before) / max(seconds, 1e-3) for now, before in zip(tokens, self._seen_tokens, strict=True)
        )
        self._seen_tokens, self._seen_s = tokens, now_s
        self.history.append(
            TrafficSample(
                time_s=now_s,
                prompt_tokens_per_s=prompt_rate,
                generation_tokens_per_s=generation_rate,
                stats=stats,
            )
        )

    def _log(self) -> None:
        now_s = time.monotonic()
        if not self._logs or now_s < self._next_log_s:
            return
        recent = [sample for sample in self.history if sample.time_s > now_s - _LOG_EVERY_S]
        if not any(sample.is_active for sample in recent):
            return
        self._next_log_s = now_s + _LOG_EVERY_S
        stats = self.history[-1].stats
        hit_rate = stats.num_prefix_hit_tokens / max(1, stats.num_prefix_query_tokens)
        logger.info(
            "prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, waiting: %d, "
            "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
            sum(sample.prompt_tokens_per_s for sample in recent) / len(recent),
            sum(sample.generation_tokens_per_s for sample in recent) / len(recent),
            stats.num_running,
            stats.num_waiting,
            stats.usage * 100,
            hit_rate * 100,
        )
