"""What all routes of one server share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.openai_errors import HttpError
from tp_engine.errors import RequestError
from tp_engine.ipc.pulse import Pulse
from tp_engine.server.admission import RETRY_AFTER_S, Admission
from tp_engine.server.config import ServerConfig
from tp_engine.server.metrics import ServerMetrics


class ServerState:
    """One server's configuration, counters and engine.  Used by the event loop's thread alone.

    ``tokenizing`` is a single thread: tokenizing a long prompt must not hold up the event loop, and a tokenizer serves
    one caller at a time.  ``sampling_defaults`` are the model's own.
    """

    def __init__(self, config: ServerConfig, model_names: tuple[str, ...]) -> None:
        self.config = config
        self.model_names = model_names
        self.created = int(time.time())
        self.admission = Admission()
        self.metrics = ServerMetrics(model_names[0])
        self.tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self.sampling_defaults: Mapping[str, Any] = {}
        self.pulse: Pulse | None = None
        self._llm: AsyncLLM | None = None

    def attach(self, llm: AsyncLLM) -> None:
        """The engine is ready."""
        self.admission.max_num_prompts = llm.model_info.max_num_seqs + self.config.max_num_queued_reqs
        self._llm = llm

    @property
    def llm(self) -> AsyncLLM:
        """The engine; ``HttpError`` 503 while it loads and after it has ended."""
        if self._llm is None:
            raise HttpError(503, "the model is still loading", code="not_ready", retry_after_s=RETRY_AFTER_S)
        if self._llm.errored:
            raise HttpError(503, "the engine has stopped", code="engine_dead")
        self._check_pulse()
        if not self._llm.is_ready:
            raise HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)
        return self._llm

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output in tokens; None while the engine loads."""
        return None if self._llm is None else self._llm.model_info.max_model_len

    def check_healthy(self) -> None:
        """``HttpError`` 503 if the engine has failed or hangs; an engine that still loads is healthy."""
        if self._llm is not None and self._llm.errored:
            raise HttpError(503, "the engine has stopped", code="engine_dead")
        self._check_pulse()

    def check_ready(self) -> None:
        """``HttpError`` 503 unless a request that comes now would be served."""
        self.admission.check_open()
        _ = self.llm

    def _check_pulse(self) -> None:
        trouble = None if self.pulse is None else self.pulse.trouble()
        if trouble is not None:
            raise HttpError(503, f"{trouble}; the job ends if that lasts", code="engine_hangs")

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; ``RequestError`` (404) for a model that is not served."""
        if asked is None or asked in self.model_names:
            return asked or self.model_names[0]
        raise RequestError(
            f"the model {asked[:200]!r} does not exist; this server has {', '.join(self.model_names)}",
            param="model",
            code="model_not_found",
        )

    async def close(self) -> None:
        """Leave the engine."""
        self.tokenizing.shutdown(wait=False, cancel_futures=True)
        if self._llm is not None:
            await self._llm.close()
