"""``AsyncLLM``: many requests at once from asyncio, each as a stream; the model runs in other processes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tp_engine.adapters import LoRARequest, load_for
from tp_engine.api.beam_search import BeamSearch, beam_search_output, one_token, run_search
from tp_engine.api.input_processor import InputProcessor, Prompt, load_tokenizer, prompt_text
from tp_engine.api.output_streams import Outputs
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.client import EngineClient
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.errors import RankError, RequestError
from tp_engine.options.intake import take_options
from tp_engine.outputs import BeamSearchOutput, RequestOutput
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import BeamSearchParams, SamplingParams
from tp_engine.sched.view import ViewLimits

if TYPE_CHECKING:
    from tp_engine.engine.service_process import ServiceHandle
    from tp_engine.engine.staged_tensors import NamedTensors

_STOP_TIMEOUT_S = 15.0
_PULSE_S = 0.5
_UPDATE_S = 3600.0
_LOOK_S = 0.01
_LONG_TEXT = 2000  # characters; tokenizing more, or checking a grammar, in the event loop would delay all streams


class AsyncLLM:
    """A model for the tasks of one event loop.

    ``AsyncLLM(model=..., tensor_parallel_size=2)`` takes the fields of ``EngineConfig`` and starts its own ranks with
    ``start()``, which ``async with`` and the first request do too; ``AsyncLLM.connect(address)`` uses a running
    ``EngineService``.  Ends with ``await close()``.
    """

    def __init__(self, model: str = str(DEMO_MODEL), *, address: str | None = None, **options: Any) -> None:
        taken = take_options(options, [EngineConfig], where="AsyncLLM")
        self._config = None if address is not None else EngineConfig(model=model, **taken)
        self._address = address
        self._tokenizer_given: Any | None = None
        self._service: ServiceHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._outputs: Outputs | None = None
        self._input: InputProcessor | None = None
        self._starting = asyncio.Lock()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")

    @classmethod
    async def connect(cls, address: str, *, tokenizer: Any | None = None, timeout_s: float = 60.0) -> Self:
        """Use the ``EngineService`` at ``address``; ``tokenizer`` is the model's own unless given.

        Raises ``EngineDeadError`` if the service does not answer within ``timeout_s``.
        """
        llm = cls(address=address)
        llm._tokenizer_given = tokenizer
        await llm.start(timeout_s=timeout_s)
        return llm

    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Connect, and start the ranks first unless ``connect`` gave an address; a second call does nothing."""
        async with self._starting:
            if self._client is not None:
                return
            try:
                await self._start(timeout_s)
            except BaseException:
                await self.close()
                raise

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Yield what each step adds; the last update carries the whole ``request_output``.

        Leaving the loop early aborts the request.  Raises ``RequestError`` for a bad request and ``EngineDeadError``
        when the engine ends before the request does.
        """
        request_id = request_id or new_request_id()
        request = await self._prepare(prompt, params or SamplingParams(), request_id, priority, lora_request)
        async with aclosing(self.stream_request(request, prompt_text(prompt))) as updates:
            async for update in updates:
                yield update

    def stream_request(self, request: EngineRequest, prompt: str | None = None) -> AsyncGenerator[SequenceUpdate, None]:
        """As ``stream``, for a request that ``input_processor`` has made; ``prompt`` is kept for its output."""
        return self._ready_outputs.stream(request, prompt)

    def stream_batches(self, request: EngineRequest) -> AsyncGenerator[list[SequenceUpdate], None]:
        """As ``stream_request``, with all updates together that came while the reader was busy."""
        return self._ready_outputs.batches(request, None)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The whole request as it stands after each step, the last one ``finished``.  ``stream`` costs less."""
        request_id = request_id or new_request_id()
        stream = self.stream(prompt, params, request_id=request_id, priority=priority, lora_request=lora_request)
        async with aclosing(stream) as updates:
            async for update in updates:
                output = update.request_output or self._ready_outputs.so_far(request_id)
                if output is not None:
                    yield output

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, request_id: str | None = None, priority: int = 0
    ) -> BeamSearchOutput:
        """As ``LLM.beam_search``, for one prompt.  Cancelling the task ends the search in the engine too."""
        request = await self._prepare(prompt, one_token(params), request_id or new_request_id(), priority)
        search = BeamSearch(request, params, self.model_info)
        await self.run_search(search)
        return beam_search_output(search, self.decoder)

    async def run_search(self, search: BeamSearch) -> None:
        """Run a search to its end; ``input_processor`` has made its request."""

        async def generate(request: EngineRequest) -> RequestOutput:
            async with aclosing(self.stream_request(request)) as updates:
                *_, last = [update async for update in updates]
            assert last.request_output is not None
            return last.request_output

        await run_search(search, generate)

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """As ``LLM.load_adapter``."""
        await self.start()
        await self.engine.act("load_adapter", name=name, path=path, replaces=load_inplace)
        self.input_processor.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """As ``LLM.unload_adapter``."""
        await self.start()
        await self.engine.act("unload_adapter", name=name)
        self.input_processor.adapters.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with finish reason ``abort``.  Nothing happens for one that has ended."""
        self._ready_outputs.abort(request_id)

    async def prefetch(self, prompt_cache_key: str, cache_salt: str | None = None) -> None:
        """Say that the next request of a session (``SamplingParams.prompt_cache_key``) will come soon.

        While other requests run, the host tier's part of what the session ended with comes back meanwhile.
        """
        self.engine.expect(prompt_cache_key, cache_salt or "")

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
            raise RequestError(f"mode is {mode!r}; it must be keep, abort or wait", param="mode")
        if mode == "wait":
            await self._wait_for_streams(timeout_s)
        await self.engine.act("pause", mode="abort" if mode == "abort" else "keep")

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self.engine.act("resume")
        self._ready_outputs.release()

    async def sleep(self, level: int = 1) -> None:
        """As ``LLM.sleep``."""
        await self.engine.act("sleep", level=level)

    async def wake_up(self) -> None:
        """As ``LLM.wake_up``."""
        await self.engine.act("wake_up")
        self._ready_outputs.release()

    async def weight_info(self) -> dict[str, Any]:
        """``weight_version``, ``default`` for the weights of the start, ``is_paused`` and ``is_sleeping``."""
        return await self.engine.act("weight_info")

    async def _update_weights(self, weight_version: str | None, flush_cache: bool, **source: Any) -> str:
        asked = {"weight_version": weight_version, "flush_cache": flush_cache, **source}
        version: str = (await self.engine.act("update_weights", timeout_s=_UPDATE_S, **asked))["weight_version"]
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

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> Prompt:
        """The prompt of a conversation, by the model's chat template."""
        await self.start()

        def render() -> list[int]:
            return self.input_processor.chat_token_ids(messages, **template_options)

        return {"prompt_token_ids": await asyncio.get_running_loop().run_in_executor(self._tokenizing, render)}

    async def report(self, view: ViewLimits | None = None, *, timeout_s: float = 5.0) -> EngineReport:
        """How the scheduler and every rank stand; with ``view`` also the KV pool and the running sequences."""
        return await self.engine.report(view, timeout_s=timeout_s)

    async def close(self) -> None:
        """Leave the engine, and stop it if it was started here.  Running requests end with ``EngineDeadError``."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            if self._service is not None and self._client.error is None:
                self._client.stop()
                await self._client.wait_ended(timeout_s=_STOP_TIMEOUT_S)
            await self._client.close()
        if self._outputs is not None:
            await self._outputs.close()
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._service is not None:
            service, self._service = self._service, None
            await asyncio.to_thread(service.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engine(self) -> EngineClient:
        """The connection to the engine: its statistics, what operators ask of it, and its end."""
        assert self._client is not None, "start() first"
        return self._client

    @property
    def model_info(self) -> ModelInfo:
        """What the engine told of itself and the model."""
        return self.engine.model_info

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer; None for a model without one."""
        return self.input_processor.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """Makes requests for ``stream_request``."""
        assert self._input is not None, "start() first"
        return self._input

    @property
    def decoder(self) -> TokenDecoder | None:
        """What turns token ids into text; None for a model without a tokenizer."""
        return self._ready_outputs.decoder

    @property
    def num_unfinished(self) -> int:
        """Requests whose streams have not ended."""
        return 0 if self._outputs is None else self._outputs.num_streams

    @property
    def errored(self) -> bool:
        """Whether the engine has ended unasked."""
        return self._client is not None and self._client.error is not None and not self._client.stopped

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts a new request."""
        return self._client is not None and self._client.error is None

    @property
    def _ready_outputs(self) -> Outputs:
        assert self._outputs is not None, "start() first"
        return self._outputs

    async def _start(self, timeout_s: float) -> None:
        if self._config is not None:
            from tp_engine.engine.service_process import spawn_service  # torch, which no connected frontend needs

            timeout_s = self._config.startup_timeout_s
            self._service = await asyncio.to_thread(spawn_service, self._config)
            self._address = self._service.address
        assert self._address is not None
        outputs = Outputs()
        client = self._client = await EngineClient.connect(self._address, outputs, timeout_s=timeout_s)
        info, tokenizer = client.model_info, self._tokenizer_given
        if tokenizer is None:
            tokenizer = await asyncio.to_thread(load_tokenizer, info.tokenizer, info.revision)
        outputs.open(client, tokenizer)
        if self._service is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch_service(self._service, client))
        self._input = InputProcessor(info, tokenizer)
        self._outputs = outputs

    async def _watch_service(self, service: ServiceHandle, client: EngineClient) -> None:
        """End a rank 0 that hangs: a stopped process can not end itself, and this process is its parent."""
        while not await client.wait_ended(timeout_s=_PULSE_S):
            try:
                service.check_pulse()
            except RankError as error:
                client.give_up(str(error))
                await asyncio.to_thread(service.kill)

    async def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        lora: LoRARequest | None = None,
    ) -> EngineRequest:
        await self.start()
        load = None if lora is None else load_for(lora, self.input_processor.adapters)
        if load is not None:
            await self.load_adapter(load["name"], load["path"], load_inplace=True)
        name = "" if lora is None else lora.lora_name

        def prepare() -> EngineRequest:
            return self.input_processor.process(prompt, params, request_id=request_id, priority=priority, adapter=name)

        if len(prompt_text(prompt) or "") > _LONG_TEXT or params.structured_outputs is not None:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, prepare)
        return prepare()


def new_request_id() -> str:
    """A unique name."""
    return uuid.uuid4().hex
