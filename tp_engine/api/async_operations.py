"""What operators ask of a running ``AsyncLLM``: adapters, weights, pauses, reports."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.output_streams import Outputs
from tp_engine.engine.client import EngineClient
from tp_engine.engine.report import EngineReport
from tp_engine.errors import RequestError, shown
from tp_engine.sched.view import ViewLimits

if TYPE_CHECKING:
    from tp_engine.engine.staged_tensors import NamedTensors

_UPDATE_S = 3600.0
_LOOK_S = 0.01


class AsyncOperations(ABC):
    """The operators' half of ``AsyncLLM``."""

    @abstractmethod
    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Connect; a second call does nothing."""

    @property
    @abstractmethod
    def engine(self) -> EngineClient:
        """The connection to the engine: its statistics, what operators ask of it, and its end."""

    @property
    @abstractmethod
    def input_processor(self) -> InputProcessor:
        """What makes requests."""

    @property
    @abstractmethod
    def _ready_outputs(self) -> Outputs: ...

    async def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """As ``LLM.load_lora_adapter``."""
        await self._act("load_lora_adapter", name=name, path=path, replaces=load_inplace)
        self.input_processor.adapters[name] = path

    async def unload_lora_adapter(self, name: str) -> None:
        """As ``LLM.unload_lora_adapter``."""
        await self._act("unload_lora_adapter", name=name)
        self.input_processor.adapters.pop(name, None)

    async def reset_prefix_cache(self) -> bool:
        """As ``LLM.reset_prefix_cache``."""
        try:
            await self._act("reset_prefix_cache")
        except RequestError:
            return False
        return True

    async def update_weights(
        self, tensors: NamedTensors, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """As ``LLM.update_weights``; ``RequestError`` while requests run, unless the engine is paused."""
        from tp_engine.engine.staged_tensors import StagedTensors  # torch, which a connected frontend may lack

        with await asyncio.to_thread(StagedTensors, tensors) as staged:
            return await self._update_weights(weight_version, flush_cache, files=staged.files)

    async def update_weights_from_disk(
        self, path: str | Path, *, weight_version: str | None = None, flush_cache: bool = False, aborts: bool = False
    ) -> str:
        """As ``LLM.update_weights_from_disk``; if it ``aborts``, unfinished requests end first."""
        return await self._update_weights(weight_version, flush_cache, folder=str(path), abort_all_requests=aborts)

    async def pause(self, mode: str = "keep", *, timeout_s: float = 600.0) -> None:
        """Run nothing until ``resume``; new requests wait.

        Unfinished ones wait too, and are computed again (``keep``), end (``abort``), or come to their end before this
        returns (``wait``).  ``TimeoutError`` if they have not within ``timeout_s``; nothing is paused then.
        """
        if mode not in ("keep", "abort", "wait"):
            raise RequestError(f"mode is {shown(mode)}; it must be keep, abort or wait", param="mode")
        await self.start()
        if mode == "wait":
            await self._wait_for_streams(timeout_s)
        await self._act("pause", mode="abort" if mode == "abort" else "keep")

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._act("resume")
        self._ready_outputs.release()

    async def sleep(self, level: int = 1) -> None:
        """As ``LLM.sleep``."""
        await self._act("sleep", level=level)

    async def wake_up(self) -> None:
        """As ``LLM.wake_up``."""
        await self._act("wake_up")
        self._ready_outputs.release()

    async def weight_info(self) -> dict[str, Any]:
        """``weight_version``, ``default`` for the weights of the start, ``is_paused`` and ``is_sleeping``."""
        return await self._act("weight_info")

    async def _act(self, action: str, **arguments: Any) -> dict[str, Any]:
        await self.start()
        return await self.engine.act(action, **arguments)

    async def _update_weights(self, weight_version: str | None, flush_cache: bool, **source: Any) -> str:
        asked = {"weight_version": weight_version, "flush_cache": flush_cache, **source}
        version: str = (await self._act("update_weights", timeout_s=_UPDATE_S, **asked))["weight_version"]
        return version

    async def _wait_for_streams(self, timeout_s: float) -> None:
        outputs = self._ready_outputs
        outputs.hold()
        try:
            async with asyncio.timeout(timeout_s):
                while outputs.num_streams:
                    await asyncio.sleep(_LOOK_S)
        except BaseException:
            outputs.release()
            raise

    async def report(self, view: ViewLimits | None = None, *, timeout_s: float = 5.0) -> EngineReport:
        """How the scheduler and every rank stand; with ``view`` also the KV pool and the running sequences."""
        return await self.engine.report(view, timeout_s=timeout_s)
