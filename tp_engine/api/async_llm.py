"""``AsyncLLM``: many requests at once from asyncio, each as a stream; the model runs in other processes."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack

from tp_engine.api.beam_search import BeamSearch, beam_search_output, one_token, run_search
from tp_engine.api.engine_options import ChatTemplateOptions, read_options
from tp_engine.api.input_processor import InputProcessor, Prompt, load_tokenizer, prompt_text
from tp_engine.api.keywords import EngineOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.output_streams import Outputs
from tp_engine.api.pooling import Pooler, PoolingLike
from tp_engine.api.preparing import PreparingThreads
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.api.scoring import ScorePairs, fields_of, paired
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.client import EngineClient
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.report import EngineReport
from tp_engine.engine.service_process import Service, spawn_service
from tp_engine.errors import ConfigError, RankError, RequestError, shown
from tp_engine.features.lora.options import LoRARequest, load_for
from tp_engine.images.sources import has_image_part
from tp_engine.requests.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tp_engine.sched.view import ViewLimits
from tp_engine.system import env
from tp_engine.system.isolation.process import needed_by, not_needed_by
from tp_engine.system.off_loop import in_thread, started

if TYPE_CHECKING:
    from tp_engine.engine.staged_tensors import NamedTensors

Launch: TypeAlias = Callable[[EngineConfig, Callable[[], bool]], Service]
"""Starts rank 0; the start is given up when the function says that nobody waits for it."""

_STOP_TIMEOUT_S = 15.0
_PULSE_S = 0.5
_UPDATE_S = 3600.0
_LOOK_S = 0.01
_LONG_TEXT = 2000  # characters; tokenizing more, or reading a schema, in the event loop would delay all streams


class AsyncLLM:
    """A model for the tasks of one event loop.

    ``AsyncLLM(model=..., tensor_parallel_size=2)`` takes the options of ``LLM`` and starts its own ranks with
    ``start()``, as do ``async with`` and the first request; ``AsyncLLM.connect(address)`` uses a running
    ``EngineService``.  End it with ``await close()``.

    ``engine``, ``input_processor``, ``outputs`` and ``run_search`` are for a server on top of this class;
    ``waits_for_images`` is that of ``InputProcessor``: all may change in any version.
    """

    def __init__(
        self,
        model: str | PathLike[str] = str(DEMO_MODEL),
        *,
        address: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.options = read_options("AsyncLLM", model, options)
        self._config = None if address is not None else self.options.engine
        self._default_params: SamplingParams | None = None
        self._address = address
        self._tokenizer_given: Any | None = None
        self._service: Service | None = None
        self._watching: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._outputs: Outputs | None = None
        self._input: InputProcessor | None = None
        self._starting, self._closing = asyncio.Lock(), asyncio.Lock()
        self.preparing = PreparingThreads()
        self.waits_for_images = True

    @classmethod
    async def connect(cls, address: str, *, tokenizer: Any | None = None, timeout_s: float = 60.0) -> Self:
        """Use the ``EngineService`` at ``address``; ``tokenizer`` is the model's unless given.

        Raises ``EngineDeadError`` if the service does not answer within ``timeout_s``.
        """
        llm = cls(address=address)
        llm._tokenizer_given = tokenizer
        await llm.start(timeout_s=timeout_s)
        return llm

    async def start(self, *, timeout_s: float = 60.0, launch: Launch | None = None) -> None:
        """Connect, and start the ranks first, by ``launch`` if it is given, unless ``connect`` gave an address; a
        second call does nothing."""
        async with self._starting:
            if self._client is not None:
                return
            try:
                await self._start(timeout_s, launch)
            except BaseException:
                await self.close()
                raise

    async def get_tokenizer(self) -> Any | None:
        """Return the model's tokenizer, of transformers; None for a model without one."""
        await self.start()
        return self.tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: those of the model's generation_config.json, unless options
        say otherwise.  ``ConfigError`` if that file cannot be used."""
        await self.start()
        if self._default_params is None:
            info = self.model_info
            self._default_params = await in_thread(self.options.sampling.params, info.model, info.revision)
        return self._default_params

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Yield what each step adds; the last update carries the whole ``request_output``.

        ``sampling_params`` are as for ``LLM.generate``.  Leaving the loop early aborts the request.  Raises
        ``RequestError`` for a bad request and ``EngineDeadError`` when the engine ends before the request does.
        """
        request = await self._prepare(prompt, sampling_params, request_id, priority, lora_request)
        async with aclosing(self.outputs.stream(request, prompt_text(prompt))) as updates:
            async for update in updates:
                yield update

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request after each step, as ``SamplingParams.output_kind`` says: everything so far, only what is
        new, or only the end.  The last one is ``finished``.  ``stream`` costs less."""
        request = await self._prepare(prompt, sampling_params, request_id, priority, lora_request)
        text, kind = prompt_text(prompt), request.params.output_kind
        async with aclosing(self.outputs.stream(request, text)) as updates:
            async for update in updates:
                output = update.request_output
                if kind is RequestOutputKind.DELTA:
                    output = update.as_output(request, text)
                elif kind is RequestOutputKind.CUMULATIVE and output is None:
                    output = self.outputs.so_far(request.request_id)
                if output is not None:
                    yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **template_options: Unpack[ChatTemplateOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, through the model's chat template; yields what ``generate`` yields."""
        prompt = await self.chat_prompt(messages, **template_options)
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority, lora_request=lora_request)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingLike = None, request_id: str | None = None, *, priority: int = 0
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt, by a model for embeddings."""
        await self.start()
        pooler = Pooler.of(self.input_processor, pooling_params, "embed")
        return pooler.embedding(await self._pool(pooler, prompt, request_id, priority))

    async def classify(
        self, prompt: Prompt, pooling_params: PoolingLike = None, request_id: str | None = None, *, priority: int = 0
    ) -> ClassificationRequestOutput:
        """Return how likely each label of a classifier is for a prompt."""
        await self.start()
        pooler = Pooler.of(self.input_processor, pooling_params, "classify")
        return pooler.classification(await self._pool(pooler, prompt, request_id, priority))

    async def reward(
        self, prompt: Prompt, pooling_params: PoolingLike = None, request_id: str | None = None, *, priority: int = 0
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return a reward model's score of a prompt, or of each of its tokens if the model judges steps."""
        await self.start()
        pooler = Pooler.of_rewards(self.input_processor, pooling_params)
        return pooler.pooled(await self._pool(pooler, prompt, request_id, priority))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingLike = None,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        priority: int = 0,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return a prompt's result of ``pooling_task`` (``embed``, ``classify`` or ``token_classify``; by default the
        model's own), as an array."""
        await self.start()
        pooler = Pooler.of(self.input_processor, pooling_params, pooling_task)
        return pooler.pooled(await self._pool(pooler, prompt, request_id, priority))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        request_id: str | None = None,
        *,
        instruction: str | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document answers its query, by a reranker or a model for embeddings: one query for all
        documents, or one for each.  ``instruction`` tells a reranker what relevant means."""
        await self.start()
        pairs = paired(queries, documents)
        scored = await self.preparing.run(
            sum(len(str(text)) for pair in pairs for text in pair),
            ScorePairs.of,
            self.input_processor,
            pairs,
            request_id=request_id or new_request_id(),
            instruction=instruction,
            priority=priority,
            fields=fields_of(queries, documents),
        )
        return scored.outputs(await asyncio.gather(*map(self._last, scored.requests)))

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Return the ``beam_width`` best continuations of a prompt.  Cancelling the task also ends the search in the
        engine."""
        request = await self._prepare(prompt, one_token(params), request_id, priority, lora_request)
        search = BeamSearch(request, params, self.model_info)
        await self.run_search(search)
        return beam_search_output(search, self.outputs.decoder)

    async def _pool(self, pooler: Pooler, prompt: Prompt, request_id: str | None, priority: int) -> RequestOutput:
        request = await self.preparing.run(
            len(prompt_text(prompt) or ""),
            pooler.request,
            prompt,
            request_id=request_id or new_request_id(),
            priority=priority,
        )
        return await self._last(request)

    async def run_search(self, search: BeamSearch) -> None:
        """Run a search to its end; ``input_processor`` has made its request."""
        await run_search(search, self._last)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with finish reason ``abort``.  Nothing happens for one that has ended."""
        self.outputs.abort(request_id)

    async def prefetch(self, prompt_cache_key: str, cache_salt: str | None = None) -> None:
        """Announce the next request of a session (``SamplingParams.prompt_cache_key``).

        Until it comes, the session's blocks are loaded back from the host tier while other requests run.
        """
        self.engine.prefetch_session(prompt_cache_key, cache_salt or "")

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Unpack[ChatTemplateOptions]
    ) -> Prompt:
        """Return the prompt of a conversation, by the model's chat template."""
        await self.start()
        size, has_images = sum(len(str(message)) for message in messages), has_image_part(messages)
        work = partial(self.input_processor.chat_prompt, messages, **template_options)
        return await self.preparing.run(size, work, has_images=has_images)

    async def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Load the PEFT adapter in the folder ``path`` under ``name``; raises ``RequestError`` if it cannot be served,
        or if the name is taken and not ``load_inplace``."""
        await self.act("load_lora_adapter", name=name, path=path, replaces=load_inplace)
        self.input_processor.adapters[name] = path

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter; raises ``RequestError`` for an unknown name."""
        await self.act("unload_lora_adapter", name=name)
        self.input_processor.adapters.pop(name, None)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; while requests run, does nothing and returns False."""
        try:
            await self.act("reset_prefix_cache")
        except RequestError:
            return False
        return True

    async def reset_mm_cache(self) -> None:
        """Forget all embeddings of images."""
        await self.act("reset_mm_cache")

    async def update_weights(
        self, tensors: NamedTensors, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """Replace the weights by the tensors of a checkpoint of this model, by their names in it; returns the version.

        All ranks take them or none.  ``RequestError`` names a tensor that is missing, unexpected or misshapen; it is
        raised too while requests run, unless the engine is paused.
        """
        from tp_engine.engine.staged_tensors import StagedTensors  # needs torch, which a connected frontend may lack

        with await asyncio.to_thread(StagedTensors, tensors) as staged:
            return await self.update_weights_from(
                weight_version=weight_version, flush_cache=flush_cache, files=staged.files
            )

    async def update_weights_from_disk(
        self,
        path: str | Path,
        *,
        weight_version: str | None = None,
        flush_cache: bool = False,
        abort_running: bool = False,
    ) -> str:
        """Replace the weights by a checkpoint in a folder that all ranks can read; returns the version.  With
        ``abort_running``, unfinished requests end first."""
        return await self.update_weights_from(
            weight_version=weight_version, flush_cache=flush_cache, folder=str(path), abort_all_requests=abort_running
        )

    async def update_weights_from(self, **source: Any) -> str:
        """Replace the weights; ``source`` are the arguments of the action ``update_weights``."""
        version: str = (await self.act("update_weights", timeout_s=_UPDATE_S, **source))["weight_version"]
        return version

    async def pause(self, mode: str = "keep", *, timeout_s: float = 600.0) -> None:
        """Run nothing until ``resume``; new requests wait.

        Unfinished ones wait, too, and are computed again (``keep``), are aborted (``abort``), or finish before this
        returns (``wait``).  Raises ``TimeoutError`` if they have not within ``timeout_s``; nothing is paused then.
        """
        if mode not in ("keep", "abort", "wait"):
            raise RequestError(f"mode is {shown(mode)}; it must be keep, abort or wait", param="mode")
        await self.start()
        if mode == "wait":
            await self._wait_for_streams(timeout_s)
        await self.act("pause", mode="abort" if mode == "abort" else "keep")

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.act("resume")
        self.outputs.release()

    async def sleep(self, level: int = 1) -> None:
        """Pause, and free memory: at level 1 the KV cache's, whose prefixes are all forgotten."""
        await self.act("sleep", level=level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Continue after ``sleep``, or wake only what ``tags`` name (``weights``, ``kv_cache``).  Returns whether the
        engine still sleeps."""
        is_sleeping: bool = (await self.act("wake_up", tags=tags))["is_sleeping"]
        if not is_sleeping and not (await self.weight_info())["is_paused"]:
            self.outputs.release()
        return is_sleeping

    async def act(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Have the engine do ``action``, a name in ``engine/admin_commands.py``; ``RequestError`` if it refuses."""
        await self.start()
        return await self.engine.act(action, **arguments)

    async def weight_info(self) -> dict[str, Any]:
        """``weight_version``, ``default`` for the weights of the start, ``is_paused`` and ``is_sleeping``."""
        return await self.act("weight_info")

    async def report(self, view: ViewLimits | None = None, *, timeout_s: float = 5.0) -> EngineReport:
        """Return the state of the scheduler and all ranks; with ``view`` also the KV pool and the running sequences."""
        return await self.engine.report(view, timeout_s=timeout_s)

    async def close(self) -> None:
        """Disconnect, and stop an engine that was started here.  Running requests end with ``EngineDeadError``."""
        async with self._closing:
            await self._close()

    async def _close(self) -> None:
        self.preparing.close()
        if self._client is not None:
            if self._service is not None and self._client.error is None:
                self._client.stop()
                await self._client.wait_ended(timeout_s=_STOP_TIMEOUT_S)
            await self._client.close()
        if self._outputs is not None:
            await self._outputs.close()
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._input is not None:
            self._input.chat.close()
        await in_thread(not_needed_by, self)
        if self._service is not None:
            service, self._service = self._service, None
            await in_thread(service.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engine(self) -> EngineClient:
        """The connection to the engine: its statistics, operators' commands, and its end."""
        assert self._client is not None, "start() first"
        return self._client

    @property
    def model_info(self) -> ModelInfo:
        """The engine's description of itself and the model."""
        return self.engine.model_info

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer; None for a model without one."""
        return self.input_processor.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """Makes requests for ``outputs``."""
        assert self._input is not None, "start() first"
        return self._input

    @property
    def outputs(self) -> Outputs:
        """Streams the outputs of requests that ``input_processor`` has made."""
        assert self._outputs is not None, "start() first"
        return self._outputs

    @property
    def num_unfinished(self) -> int:
        """Requests whose streams have not ended."""
        return 0 if self._outputs is None else self._outputs.num_streams

    @property
    def errored(self) -> bool:
        """Whether the engine has ended unexpectedly."""
        return self._client is not None and self._client.error is not None and not self._client.stopped

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts a new request."""
        return self._client is not None and self._client.error is None

    async def _start(self, timeout_s: float, launch: Launch | None) -> None:
        early = None
        if self._config is not None:
            config, timeout_s = self._config, self._config.startup_timeout_s
            early = _load_early(config)
            self._service = await _launched(launch or _own_ranks(), config)
            self._address = self._service.address
        await self._connect(early, timeout_s)

    async def _connect(self, early: Future[Any | None] | None, timeout_s: float) -> None:
        assert self._address is not None
        needed_by(self)
        outputs = Outputs()
        client = self._client = await EngineClient.connect(self._address, outputs, timeout_s=timeout_s)
        info, tokenizer = client.model_info, self._tokenizer_given
        if tokenizer is None and early is not None:
            tokenizer = await asyncio.wrap_future(early)
        if tokenizer is None:
            tokenizer = await in_thread(load_tokenizer, info.tokenizer, info.revision)
        outputs.open(client, tokenizer)
        if self._service is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch_service(self._service, client))
        self._input = InputProcessor(info, tokenizer, waits_for_images=self.waits_for_images)
        self._input.chat = ChatFormat(tokenizer, self.options.chats)
        self._outputs = outputs

    async def _watch_service(self, service: Service, client: EngineClient) -> None:
        """End a rank 0 that hangs: a stopped process cannot end itself, and this process is its parent."""
        while not await client.wait_ended(timeout_s=_PULSE_S):
            try:
                service.check_pulse()
            except RankError as error:
                client.give_up(str(error))
                await in_thread(service.kill)

    async def _prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None,
        request_id: str | None,
        priority: int,
        lora: LoRARequest | None = None,
    ) -> EngineRequest:
        await self.start()
        default = await self.get_default_sampling_params() if sampling_params is None else SamplingParams()
        params = SamplingParams.of(sampling_params, default)
        load = None if lora is None else load_for(lora, self.input_processor.adapters)
        if load is not None:
            await self.load_lora_adapter(load["name"], load["path"], load_inplace=True)
        fields: dict[str, Any] = {
            "request_id": request_id or new_request_id(),
            "priority": priority,
            "adapter": "" if lora is None else lora.lora_name,
        }
        if len(prompt_text(prompt) or "") > _LONG_TEXT or waits_for_others(prompt, params):
            return await self.prepared(prompt, params, **fields)
        return self.input_processor.process(prompt, params, **fields)

    async def prepared(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> EngineRequest:
        """The result of ``input_processor.process``, run in another thread."""
        work = partial(self.input_processor.process, prompt, params, **fields)
        return await self.preparing.run(len(prompt_text(prompt) or ""), work, has_images=_has_images(prompt))

    async def _wait_for_streams(self, timeout_s: float) -> None:
        outputs = self.outputs
        outputs.hold()
        try:
            async with asyncio.timeout(timeout_s):
                while outputs.num_streams:
                    await asyncio.sleep(_LOOK_S)
        except BaseException:
            outputs.release()
            raise

    async def _last(self, request: EngineRequest) -> RequestOutput:
        """The finished output of a request that ``input_processor`` has made."""
        async with aclosing(self.outputs.stream(request)) as updates:
            *_, last = [update async for update in updates]
        assert last.request_output is not None
        return last.request_output


def _own_ranks() -> Launch:
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        raise ConfigError(
            f"AsyncLLM starts its own ranks, but torchrun has started {launched.world_size}; start the script "
            f"without torchrun, with tensor_parallel_size={launched.world_size}, or use LLM"
        )
    return spawn_service


async def _launched(launch: Launch, config: EngineConfig) -> Service:
    """The service that ``launch`` starts, in a thread; if this is cancelled, the thread ends it."""
    is_over = threading.Event()
    starting = started(launch, config, is_over.is_set)
    try:
        return await asyncio.shield(asyncio.wrap_future(starting))
    except asyncio.CancelledError:
        is_over.set()
        starting.add_done_callback(_end_unused)
        raise


def _end_unused(starting: Future[Service]) -> None:
    if starting.exception() is None:
        starting.result().kill()
        starting.result().close()


def _load_early(config: EngineConfig) -> Future[Any | None]:
    """Read the tokenizer of a local folder while rank 0 starts; None for other models, and for one that cannot be read,
    which is reported when rank 0 has checked the rest."""

    def load() -> Any | None:
        with suppress(Exception):
            if Path(config.tokenizer_source).is_dir():
                return load_tokenizer(config.tokenizer_source, config.revision)
        return None

    return started(load)


def waits_for_others(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether other processes read a part of the request: images, or a schema."""
    return params.structured_outputs is not None or _has_images(prompt)


def _has_images(prompt: Prompt) -> bool:
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def new_request_id() -> str:
    """A unique name."""
    return uuid.uuid4().hex
