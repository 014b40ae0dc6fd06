"""What all routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import RequestError
from tp_engine.ipc.pulse import Pulse
from tp_engine.request import EngineRequest
from tp_engine.server.admission import RETRY_AFTER_S, Admission
from tp_engine.server.config import ServerConfig
from tp_engine.server.engine_watch import EngineWatch
from tp_engine.server.metrics import ServerMetrics
from tp_engine.server.observation import Observation
from tp_engine.server.running import RunningRequests
from tp_engine.server.tracing import RequestTracer


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
        self.running = RunningRequests()
        self.metrics = ServerMetrics(model_names[0])
        self.watch = EngineWatch(lambda: self.llm, self.metrics.requests, logs=not config.disable_log_stats)
        self.tracer: RequestTracer | None = None
        if config.otlp_traces_endpoint is not None:
            self.tracer = RequestTracer.to_endpoint(config.otlp_traces_endpoint, model_names[0])
        self.tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self.sampling_defaults: Mapping[str, Any] = {}
        self.pulse: Pulse | None = None
        self._llm: AsyncLLM | None = None

    def attach(self, llm: AsyncLLM) -> None:
        """The engine is ready."""
        self.admission.max_num_prompts = llm.model_info.max_num_seqs + self.config.max_num_queued_reqs
        self.metrics.attach(llm.model_info)
        llm.input_processor.chat = ChatFormat(llm.tokenizer, self.config)
        self._llm = llm

    @property
    def llm(self) -> AsyncLLM:
        """The engine; ``HttpError`` 503 while it loads and after it has ended."""
        llm = self.healthy_llm()
        if not llm.is_ready:
            raise HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)
        return llm

    def observation(self, request: EngineRequest, *, num_sequences: int | None = None) -> Observation:
        """Watches one prompt; it has as many sequences as it asks for, unless said."""
        return Observation(
            self.metrics.requests,
            request,
            num_sequences=request.params.n if num_sequences is None else num_sequences,
            logs=self.config.enable_log_requests,
            tracer=self.tracer,
        )

    def healthy_llm(self) -> AsyncLLM:
        """The engine, which may be ending in good order; ``HttpError`` 503 while it loads, if it failed or hangs."""
        if self._llm is None:
            raise HttpError(503, "the model is still loading", code="not_ready", retry_after_s=RETRY_AFTER_S)
        if self._llm.errored:
            raise HttpError(503, "the engine has stopped", code="engine_dead")
        self._check_pulse()
        return self._llm

    def check_ready(self) -> None:
        """``HttpError`` 503 unless a request that comes now would be served."""
        self.admission.check_open()
        _ = self.llm

    def check_room(self) -> None:
        """``HttpError`` where not even one prompt could be taken: its body need not be read, and held in memory."""
        _ = self.llm
        self.admission.check_room()

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
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
