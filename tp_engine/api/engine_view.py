"""``LLM.engine``: what a program may ask of rank 0, which runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport
from tp_engine.sched.view import SchedulerStats, ViewLimits

Ask: TypeAlias = Callable[..., Any]


class EngineView:
    """Rank 0 of ``llm``; ``ask`` waits for what the event loop of ``llm`` is given."""

    def __init__(self, llm: AsyncLLM, ask: Ask) -> None:
        self._llm, self._ask = llm, ask

    @property
    def model_info(self) -> ModelInfo:
        """What the engine told of itself and the model."""
        return self._llm.model_info

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """Return how the scheduler and every rank stand; with ``view`` also the KV pool and the running sequences."""
        report: EngineReport = self._ask(self._llm.report, view)
        return report

    def stats(self) -> SchedulerStats:
        """Return requests, blocks and counters now."""
        return self.report().stats

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        stats = self.stats()
        return stats.num_running + stats.num_waiting > 0

    def act(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Let the engine do ``action``, a name in ``engine/admin_commands.py``; ``RequestError`` if it refuses."""
        result: dict[str, Any] = self._ask(self._llm.act, action, **arguments)
        return result

    def check_integrity(self) -> None:
        """Let rank 0 assert that all blocks are accounted for."""
        self.act("check_integrity")

    def memory_growth_bytes(self) -> int:
        """Return the bytes of device memory that rank 0 has taken since it became ready, without the KV cache."""
        growth: int = self.act("memory_growth")["num_bytes"]
        return growth
