"""``LLM.engine``: what a program may ask of rank 0, which runs in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport
from tp_engine.sched.view import SchedulerStats, ViewLimits

Ask: TypeAlias = Callable[..., Any]


class EngineView:
    """Rank 0 of ``llm``; ``ask`` runs a coroutine in the event loop of ``llm`` and waits for it."""

    def __init__(self, llm: AsyncLLM, ask: Ask) -> None:
        self._llm, self._ask = llm, ask

    @property
    def model_info(self) -> ModelInfo:
        """The engine's description of itself and the model."""
        return self._llm.model_info

    def report(self, view: ViewLimits | None = None) -> EngineReport:
        """The state of the scheduler and every rank; with ``view`` also the KV pool and the running sequences."""
        report: EngineReport = self._ask(self._llm.report, view)
        return report

    def stats(self) -> SchedulerStats:
        """The present requests, blocks and counters."""
        return self.report().stats

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        stats = self.stats()
        return stats.num_running + stats.num_waiting > 0

    def act(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Have the engine do ``action``, a name in ``engine/admin_commands.py``; ``RequestError`` if it refuses."""
        result: dict[str, Any] = self._ask(self._llm.act, action, **arguments)
        return result

    def check_integrity(self) -> None:
        """Have rank 0 assert that all blocks are accounted for."""
        self.act("check_integrity")

    def memory_growth_bytes(self) -> int:
        """The bytes of device memory that rank 0 has taken since it became ready, except for the KV cache."""
        growth: int = self.act("memory_growth")["num_bytes"]
        return growth
