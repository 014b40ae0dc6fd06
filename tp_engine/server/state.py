"""What all routes of one server share: its configuration, engine, limit on prompts, and running requests."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.preparing import PreparingThreads
from tp_engine.errors import RequestError
from tp_engine.ipc.pulse import Pulse
from tp_engine.requests.request import EngineRequest
from tp_engine.server.access import Caller, ModelDirs, current_caller
from tp_engine.server.body_budget import BodyBudget
from tp_engine.server.config import ServerConfig
from tp_engine.server.connections import Connections
from tp_engine.server.engine_watch import EngineWatch
from tp_engine.server.metrics import ServerMetrics
from tp_engine.server.observation import Observation
from tp_engine.server.tracing import RequestTracer

_RETRY_AFTER_S = 1
_STUCK_S = 20.0
_SPARE, _SPARE_OF_ONE = 8, 4


class ServerState:
    """One server's configuration, counters and engine, for the event loop's thread alone.

    ``preparing`` are the threads in which requests are prepared.  ``sampling_defaults`` are the model's.
    """

    def __init__(self, config: ServerConfig, model_names: tuple[str, ...]) -> None:
        self.config = config
        self.model_names = model_names
        self.created = int(time.time())
        self.limit = PromptLimit()
        self.bodies = BodyBudget(config.max_bodies_bytes)
        self.running = RunningRequests()
        self.connections = Connections(config)
        self.metrics = ServerMetrics(model_names[0], config.metrics_prefix)
        self.watch = EngineWatch(lambda: self.llm, self.metrics.requests, logs=not config.disable_log_stats)
        self.tracer: RequestTracer | None = None
        if config.otlp_traces_endpoint is not None:
            self.tracer = RequestTracer.to_endpoint(config.otlp_traces_endpoint, model_names[0])
        self.preparing = PreparingThreads()
        self.sampling_defaults: Mapping[str, Any] = {}
        self.pulse: Pulse | None = None
        self.model_dirs = ModelDirs((), "", ())
        self._llm: AsyncLLM | None = None

    async def open(self, llm: AsyncLLM) -> None:
        """Load the model's sampling defaults, and serve with ``llm``, which is ready."""
        info = llm.model_info
        self.sampling_defaults = await asyncio.to_thread(self.config.defaults, info.model, info.revision)
        self.attach(llm)

    def attach(self, llm: AsyncLLM) -> None:
        """Serve with ``llm``, whose sampling defaults are known."""
        self.limit.max_num_prompts = llm.model_info.max_num_seqs + self.config.max_num_queued_reqs
        self.metrics.attach(llm.model_info)
        llm.input_processor.chat = chat = ChatFormat(llm.tokenizer, self.config)
        chat.prepare()
        model, adapters = llm.model_info.model, llm.input_processor.adapters
        self.model_dirs = ModelDirs(self.config.allowed_model_dirs, model, adapters.values())
        self._llm = llm

    @property
    def llm(self) -> AsyncLLM:
        """The engine; raises ``HttpError`` 503 while it loads and after it has ended."""
        llm = self.healthy_llm()
        if not llm.is_ready:
            raise HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=_RETRY_AFTER_S)
        return llm

    @property
    def takes_images(self) -> bool:
        """Whether the model is served with its images."""
        return self._llm is not None and self._llm.input_processor.images is not None

    def observation(self, request: EngineRequest, *, num_sequences: int | None = None) -> Observation:
        """An observation of one prompt; ``num_sequences`` is what the prompt asks for, unless given."""
        images = self.llm.input_processor.images
        if images is not None:
            self.metrics.requests.note_image_seconds(images.reader.seconds)
        return Observation(
            self.metrics.requests,
            request,
            num_sequences=request.params.n if num_sequences is None else num_sequences,
            logs=self.config.enable_log_requests,
            tracer=self.tracer,
        )

    def healthy_llm(self) -> AsyncLLM:
        """The engine, which may be draining; raises ``HttpError`` 503 while it loads, and if it failed or hangs."""
        if self._llm is None:
            doing = "" if self.pulse is None else self.pulse.doing()
            text = f"the model is still loading ({doing})" if doing else "the model is still loading"
            raise HttpError(503, text, code="not_ready", retry_after_s=_RETRY_AFTER_S)
        if self._llm.errored:
            raise HttpError(503, "the engine has stopped", code="engine_dead")
        if self.pulse is not None and (trouble := self.pulse.trouble()) is not None:
            raise HttpError(503, f"{trouble}; the job ends if that lasts", code="engine_hangs")
        return self._llm

    def check_ready(self) -> None:
        """Raise ``HttpError`` 503 unless a request would be served now."""
        self.limit.check_open()
        _ = self.llm
        if (busy_s := self.preparing.busy_s()) > _STUCK_S:
            raise HttpError(503, f"a request has been in preparation for {busy_s:.0f} s", code="preparation_stuck")

    def check_room(self) -> None:
        """Raise ``HttpError`` if the limit has no room for one prompt: then the request's body need not be read."""
        _ = self.llm
        self.limit.check_room()

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; raises ``RequestError`` (404) for a model that is not served."""
        if not asked or asked in self.model_names:
            return asked or self.model_names[0]
        adapters = self.adapters
        if asked in adapters:
            return asked
        raise RequestError(
            f"the model {asked[:200]!r} does not exist; this server has {', '.join((*self.model_names, *adapters))}",
            param="model",
            code="model_not_found",
        )

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folders of the loaded adapters, by name."""
        return {} if self._llm is None else self._llm.input_processor.adapters

    async def close(self) -> None:
        """Disconnect from the engine."""
        self.preparing.close()
        if self._llm is not None:
            self.watch.log_block_size(self._llm.model_info.block_size)
            await self._llm.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


class PromptLimit:
    """Holds at most ``max_num_prompts`` prompts, each from acceptance to the last byte of its answer.

    Another one is answered with 429; once the server drains, with 503.  The maximum is set when the engine is known.

    Another eighth is spare, for clients that hold few: each gets up to a quarter of it, so a client that fills the
    server does not shut out all others.
    """

    def __init__(self) -> None:
        self.max_num_prompts = 0
        self._num_prompts = 0
        self._num_of: Counter[str] = Counter()  # by client
        self.is_draining = False  # new requests are refused; those held may finish
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_prompts(self) -> int:
        """Prompts held now."""
        return self._num_prompts

    def is_full(self) -> bool:
        """Whether no further prompt would be taken, spare places aside."""
        return 0 < self.max_num_prompts <= self._num_prompts

    def check_open(self) -> None:
        """Raise ``HttpError`` 503 once the server drains."""
        if self.is_draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=_RETRY_AFTER_S)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no prompt is held; False if one still is after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def check_room(self, num_prompts: int = 1, param: str | None = None) -> None:
        """Raise ``HttpError`` unless there is room for ``num_prompts`` more; ``RequestError`` if there can never be."""
        self.check_open()
        if num_prompts > self.max_num_prompts > 0:
            raise RequestError(
                f"the body has {num_prompts} prompts; this server takes at most {self.max_num_prompts} at a time: send "
                "fewer in a body, or start it with a larger --max-num-queued-reqs",
                param=param,
            )
        if self._num_prompts + num_prompts > self.max_num_prompts and not self._is_spare(num_prompts):
            raise HttpError(
                429,
                f"{self._num_prompts} prompts are running or queued and {num_prompts} more do not fit in "
                f"{self.max_num_prompts}; try again later",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _is_spare(self, num_prompts: int) -> bool:
        spare = self.max_num_prompts // _SPARE
        held = self._num_of.get(current_caller().client, 0)
        return held + num_prompts <= spare // _SPARE_OF_ONE and self._num_prompts + num_prompts <= (
            self.max_num_prompts + spare
        )

    @contextlib.contextmanager
    def hold(self, num_prompts: int, param: str | None = None) -> Iterator[None]:
        """Hold the ``num_prompts`` of the field ``param`` within; raises as ``check_room`` does."""
        self.check_room(num_prompts, param)
        client = current_caller().client
        self._num_prompts += num_prompts
        self._num_of[client] += num_prompts
        self._idle.clear()
        try:
            yield
        finally:
            self._num_prompts -= num_prompts
            self._num_of[client] -= num_prompts
            if not self._num_of[client]:
                del self._num_of[client]
            if self._num_prompts == 0:
                self._idle.set()


class RunningRequests:
    """Ids of running engine requests: ``cmpl-ID-NUMBER-RANDOM`` for prompt NUMBER of the answer ``cmpl-ID``."""

    def __init__(self) -> None:
        self._owners: dict[str, bytes | None] = {}

    @contextlib.contextmanager
    def noted(self, engine_id: str) -> Iterator[None]:
        """Within, ``all`` and ``of`` find the request, as one of the current caller."""
        self._owners[engine_id] = current_caller().owner
        try:
            yield
        finally:
            del self._owners[engine_id]

    def all(self, caller: Caller | None = None) -> list[str]:
        """The engine ids that run; only those that ``caller`` may end, if one is given."""
        owners = self._owners.items()
        return sorted(engine_id for engine_id, owner in owners if caller is None or caller.may_end(owner))

    def of(self, names: Iterable[str], caller: Caller) -> list[str]:
        """The engine ids of answers, by ``id`` (``cmpl-ID``, ``resp_ID``) or by the clients' request ids (``ID``)."""
        wanted, found = {name.removeprefix("resp_") for name in names}, []
        for engine_id in self.all(caller):
            answer_id = engine_id.rsplit("-", 2)[0]
            if answer_id in wanted or answer_id.partition("-")[2] in wanted:
                found.append(engine_id)
        return found
