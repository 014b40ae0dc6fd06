"""``LLM``: synchronous batch inference, with vLLM's names; the model runs in other processes."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from tp_engine.api.allocation_monitor import AllocationMonitor
from tp_engine.api.async_llm import AsyncLLM, Launch, waits_for_others
from tp_engine.api.beam_search import BeamSearch, beam_search_output, one_token, run_searches
from tp_engine.api.calls import Call
from tp_engine.api.engine_options import ChatTemplateOptions
from tp_engine.api.engine_view import EngineView
from tp_engine.api.input_processor import InputProcessor, Prompt, prompt_text
from tp_engine.api.keywords import EngineOptions
from tp_engine.api.output_streams import Outputs
from tp_engine.api.pooling import Pooler, PoolingLike
from tp_engine.api.row_runs import OnError, Progress, Result, RowRun
from tp_engine.api.rows import Rows, as_batch, as_conversations, tokenization_options, with_lists
from tp_engine.api.scoring import ScorePairs, fields_of, paired
from tp_engine.api.team import EXTERNAL_LAUNCHER, Team, join_team, together
from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.engine.service_process import spawn_service
from tp_engine.errors import EngineDeadError, RequestError, again
from tp_engine.features.lora.options import LoRARequest, load_for
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
from tp_engine.requests.sampling_params import BeamSearchParams, SamplingParams
from tp_engine.system import env
from tp_engine.system.closing import Closing, Ending
from tp_engine.system.off_loop import LoopThread, in_thread, started

if TYPE_CHECKING:
    from tp_engine.engine.staged_tensors import NamedTensors

_MONITOR_S = 0.25
_WINDOW_PER_SEQUENCE = 4
_LEAST_WINDOW = 256

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Sampling: TypeAlias = SamplingParams | Mapping[str, Any] | None
"""How a prompt is sampled: None for the model's defaults."""
Lora: TypeAlias = LoRARequest | Iterable[LoRARequest | None] | None
"""One adapter for all prompts, or one for each."""
Prompts: TypeAlias = Prompt | Iterable[Prompt]
"""One prompt or many."""
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


_NEW_WEIGHTS = "the model is in processes of its own; new weights are given with update_weights(named tensors)"
_OF_OTHERS = {
    "llm_engine": _NEW_WEIGHTS,
    "collective_rpc": f"no code of yours runs on the ranks: {_NEW_WEIGHTS}, and engine.report() tells of the ranks",
    "apply_model": f"no code of yours runs on the ranks: {_NEW_WEIGHTS}",
}
"""Names of vLLM's class that are not here, and what to use instead."""


class LLM(Closing):
    """A model on one or more ranks, with blocking calls; calls of several threads run together.

    ``model`` is a folder or a hub name, the demo model by default; ``options`` are those of the server's engine, with
    vLLM's names (docs/flags_engine.md).  The ranks are separate processes, which end with this object, and nothing
    global of the caller's process is touched (docs/python.md).  Under torchrun this object adopts the ranks of the job:
    the script continues on rank 0; on every other rank the constructor serves until rank 0 closes, and then ends the
    process with exit code 0, so a job has one ``LLM``.  Use it as a context manager, or call ``close()``.

    ``allocation_monitor`` samples the use of the KV pool four times per second while requests run.  ``engine.report()``
    describes memory, tiers and ranks.  The rest of ``engine``, ``input_processor``, ``outputs`` and ``new_call`` are
    parts of this class that may change in any version.
    """

    def __init__(self, model: str | PathLike[str] = str(DEMO_MODEL), **options: Unpack[EngineOptions]) -> None:
        given: dict[str, Any] = {**options}
        self.team: Team | None = None
        self._ending = Ending()
        if given.get("distributed_executor_backend") != EXTERNAL_LAUNCHER:
            self._open(model, given, None)
            return
        del given["distributed_executor_backend"]
        team, given = join_team(model, given)
        if team is None:
            self._open(model, given, spawn_service)
        else:
            try:
                team.do("LLM", lambda: self._open(model, given, spawn_service))
            except BaseException:
                team.close()
                raise
            self.team = team

    def _open(self, model: Any, options: dict[str, Any], launch: Launch | None) -> None:
        """Start the engine; ``launch`` None: as the process's place in a torchrun job requires."""
        loop = self._loop = LoopThread("LLM")
        close: Callable[[], Coroutine[Any, Any, None]] = _nothing_to_close
        try:
            llm = self._async = loop.run(in_thread, partial(AsyncLLM, model, **options))
            close = llm.close
            llm.waits_for_images = False
            loop.run(llm.start, launch=launch or _launch_for(llm.options.engine))
            self._default_params = loop.run(llm.get_default_sampling_params)
            self.engine = EngineView(llm, self._ask)
            self.allocation_monitor = AllocationMonitor(interval_s=_MONITOR_S)
            self._observing: asyncio.Task[None] | None = None
            self._num_requests = itertools.count()
            self._forgotten = weakref.finalize(self, _end, self._ending, loop, llm)
        except BaseException:
            loop.finish(close)
            raise

    if not TYPE_CHECKING:  # so that type checkers refuse unknown names

        def __getattr__(self, name: str) -> NoReturn:
            remedy = _OF_OTHERS.get(name)
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(told if remedy is None else f"{told}: {remedy}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM belongs to the process that made it, and cannot be pickled or copied; create it where it is used, "
            "such as in each worker"
        )

    @property
    def input_processor(self) -> InputProcessor:
        """Makes requests from prompts."""
        return self._async.input_processor

    @property
    def outputs(self) -> Outputs:
        """The running requests, with what they have generated."""
        return self._async.outputs

    @together
    def get_tokenizer(self) -> Any | None:
        """Return the tokenizer, of transformers; None for a model without one."""
        return self.input_processor.tokenizer

    @together
    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: those of the model's generation_config.json, unless options
        say otherwise."""
        return self._default_params

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Sampling | Iterable[Sampling] = None,
        use_tqdm: Progress = True,
        lora_request: Lora = None,
        priority: int | Iterable[int] = 0,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        stream: Literal[False] = False,
        prompt_token_ids: None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Sampling | Iterable[Sampling] = None,
        use_tqdm: Progress = True,
        lora_request: Lora = None,
        priority: int | Iterable[int] = 0,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        stream: Literal[True],
        prompt_token_ids: None = None,
    ) -> Iterator[Result]: ...

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Sampling | Iterable[Sampling] = None,
        use_tqdm: Progress = True,
        lora_request: Lora = None,
        priority: int | Iterable[int] = 0,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        stream: bool = False,
        prompt_token_ids: None = None,
    ) -> Any:
        """Complete every prompt; results come in the order of the prompts.

        A prompt is text, a list or array of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; these two
        may have ``multi_modal_data`` too: ``{"image": image}``, or a list, and
        ``mm_processor_kwargs`` (docs/images.md).
        ``sampling_params`` may be a mapping of fields; None means ``get_default_sampling_params()``.  One is for all
        prompts; a list must have one for each.  The same holds for ``lora_request``, the adapter, and ``priority``.
        Raises ``RequestError``, which names the row, for a bad prompt before any prompt runs; with ``on_error``
        "return" the error is the row's result, and the others run.  A row that gets no first token raises when the
        others have ended.  The ``outputs`` of an error or interrupt are the finished ones.  After ``timeout_s`` rows
        end with what they have, and finish reason ``abort``.

        ``stream`` yields outputs as they end, with their ``row``.  Then, and for a generator of prompts, only a window
        of rows is in the engine at a time, so there may be any number; a bad prompt is found when its turn comes.
        ``tokenization_kwargs`` are vLLM's: ``truncation`` with ``max_length``, ``add_special_tokens``.
        """
        if prompt_token_ids is not None:
            raise RequestError(
                "prompt_token_ids is no parameter of generate, as in vLLM: give prompts=[ids, ids], or "
                'prompts=[{"prompt_token_ids": ids}]',
                param="prompt_token_ids",
            )
        if stream and self.team is not None:
            raise RequestError("stream is for engines of one rank with external_launcher; leave it out", param="stream")
        if not stream:
            return self._generate(
                prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, timeout_s, on_error
            )
        rows = self._prompt_rows(prompts, sampling_params, lora_request, priority, tokenization_kwargs)
        return iter(self._run_of(rows, stream=True, on_error=on_error, timeout_s=timeout_s, use_tqdm=use_tqdm))

    @together
    def _generate(self, prompts: Any, params: Any, use_tqdm: Progress, lora: Lora, priority: Any, *more: Any) -> Any:
        tokenization_kwargs, timeout_s, on_error = more
        rows = self._prompt_rows(prompts, params, lora, priority, tokenization_kwargs)
        return self._run_of(rows, on_error=on_error, timeout_s=timeout_s, use_tqdm=use_tqdm).results()

    def _prompt_rows(self, prompts: Any, params: Any, lora: Lora, priority: Any, tokenization_kwargs: Any) -> Rows:
        self._check_open()
        batch, is_one = as_batch(prompts)
        return self._rows("prompts", batch, is_one, params, lora, priority, tokenization_kwargs)

    @together
    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Sampling | Iterable[Sampling] = None,
        use_tqdm: Progress = True,
        lora_request: Lora = None,
        priority: int | Iterable[int] = 0,
        *,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
        **template_options: Unpack[ChatTemplateOptions],
    ) -> list[RequestOutput]:
        """Complete one conversation, or many, through the model's chat template; otherwise as ``generate``."""
        self._check_open()
        batch, is_one = as_conversations(messages)

        def prompt_of(conversation: Any) -> Prompt:
            return self._loop.run(self._async.chat_prompt, with_lists(conversation), **template_options)

        rows = self._rows(
            "conversations", batch, is_one, sampling_params, lora_request, priority, None, prompt_of=prompt_of
        )
        run = self._run_of(rows, on_error=on_error, timeout_s=timeout_s, use_tqdm=use_tqdm)
        return run.results()  # with errors among them if ``on_error`` asks for that

    @together
    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: Lora = None,
    ) -> list[BeamSearchOutput]:
        """Search every prompt for its ``beam_width`` best sequences; results come in the order of the prompts.

        Beams share their blocks through the prefix cache: without ``enable_prefix_caching``, each token of each beam
        costs a pass over all earlier tokens.  At most ``concurrency_limit`` prompts are searched at a time, and
        at most as many as the KV cache holds.  Raises ``RequestError`` for a bad prompt before any prompt runs.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit is {concurrency_limit}; it must be at least 1, or None")
        self._check_open()
        batch, is_one = as_batch(prompts)
        rows = self._rows("prompts", list(batch), is_one, one_token(params), lora_request, 0, None)
        searches, model = [], self.engine.model_info
        for row in rows:
            if row.error is not None:
                raise row.error
            assert row.request is not None
            searches.append(BeamSearch(row.request, params, model))
        run_searches(
            searches, self._complete, model, max_searches=concurrency_limit or len(searches), use_tqdm=use_tqdm
        )
        return [beam_search_output(search, self.outputs.decoder) for search in searches]

    @together
    def embed(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: Progress = True
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt, in their order, by a model for embeddings (docs/embeddings.md).

        Raises ``RequestError`` for a bad prompt before any prompt runs, and for a model that gives no embeddings.
        """
        pooler = Pooler.of(self.input_processor, pooling_params, "embed")
        return self._run_pooled(pooler, pooler.embedding, prompts, use_tqdm)

    @together
    def classify(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: Progress = True
    ) -> list[ClassificationRequestOutput]:
        """Return how likely each label of a classifier is for every prompt, in their order (docs/classifiers.md)."""
        pooler = Pooler.of(self.input_processor, pooling_params, "classify")
        return self._run_pooled(pooler, pooler.classification, prompts, use_tqdm)

    @together
    def reward(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: Progress = True
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's score of every prompt, or of each of its tokens if the model judges steps."""
        pooler = Pooler.of_rewards(self.input_processor, pooling_params)
        return self._run_pooled(pooler, pooler.pooled, prompts, use_tqdm)

    @together
    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingLike = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return every prompt's result of a task (``embed``, ``classify``, ``token_classify``; by default the model's
        own), as arrays."""
        pooler = Pooler.of(self.input_processor, pooling_params, pooling_task)
        return self._run_pooled(pooler, pooler.pooled, prompts, use_tqdm)

    @together
    def score(
        self,
        queries: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        instruction: str | None = None,
        use_tqdm: Progress = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document answers its query, by a reranker or a model for embeddings: one query for all
        documents, or one for each.

        ``instruction`` tells a reranker what relevant means.  Raises ``RequestError`` before anything runs.
        """
        self._check_open()
        first, second = (given if isinstance(given, str) else list(given) for given in (queries, documents))
        make = partial(
            ScorePairs.of,
            self.input_processor,
            paired(first, second),
            request_id=self._next_id(),
            instruction=instruction,
            fields=fields_of(first, second),
        )
        scored = self._loop.run(in_thread, make)
        return scored.outputs(self._complete(scored.requests, use_tqdm))

    @together
    def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Load the PEFT adapter in the folder ``path`` under ``name``.

        Raises ``RequestError``, and changes nothing, if it cannot be served, or if the name is taken and not
        ``load_inplace``.
        """
        self._ask(self._async.load_lora_adapter, name, path, load_inplace=load_inplace)

    @together
    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter; raises ``RequestError`` for an unknown name."""
        self._ask(self._async.unload_lora_adapter, name)

    @together
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; while requests run, does nothing and returns False."""
        return self._ask(self._async.reset_prefix_cache)

    @together
    def reset_mm_cache(self) -> None:
        """Forget all embeddings of images."""
        self._ask(self._async.reset_mm_cache)

    def update_weights(
        self, tensors: NamedTensors, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """Replace the weights by all tensors of a checkpoint of this model, by their names in it.

        All ranks take them or none: ``RequestError`` names a tensor that is missing, unexpected or misshapen, and
        nothing has changed.  Returns the ``weight_version``, by default the number of the update.  Prefixes cached with
        other weights are no longer found, and ``flush_cache`` frees them.
        """
        if self.team is None:
            return self._take_weights(tensors, weight_version, flush_cache)

        def take() -> None:
            for _ in tensors:  # they may be gathered from all ranks
                pass

        version: str = self.team.do(
            "update_weights", lambda: self._take_weights(tensors, weight_version, flush_cache), meanwhile=take
        )
        return version

    def _take_weights(self, tensors: NamedTensors, weight_version: str | None, flush_cache: bool) -> str:
        from tp_engine.engine.staged_tensors import StagedTensors  # needs torch, as do the caller's tensors
        from tp_engine.worker.memory.host_memory import host_memory

        self._check_open()
        with StagedTensors(tensors, memory=lambda: self._loop.run(in_thread, host_memory)) as staged:
            return self._ask(
                self._async.update_weights_from,
                weight_version=weight_version,
                flush_cache=flush_cache,
                files=staged.files,
            )

    @together
    def update_weights_from_disk(
        self, path: str | Path, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """Replace the weights by a checkpoint in a folder that all ranks can read; otherwise as ``update_weights``."""
        return self._ask(
            self._async.update_weights_from_disk, path, weight_version=weight_version, flush_cache=flush_cache
        )

    @together
    def pause(self, mode: str = "keep") -> None:
        """Run no step until ``resume``: unfinished requests, of other threads, wait and are computed again (``keep``),
        are aborted (``abort``), or finish before this returns (``wait``)."""
        self._ask(self._async.pause, mode)

    @together
    def resume(self) -> None:
        """Continue after ``pause``."""
        self._ask(self._async.resume)

    @together
    def sleep(self, level: int = 1) -> None:
        """Pause, and at level 1 free the memory of the KV cache, whose prefixes are all forgotten."""
        self._ask(self._async.sleep, level)

    @together
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Continue after ``sleep``; raises ``RequestError``, and still sleeps, if there is no memory for the cache.

        With ``tags`` only what they name wakes: ``weights``, which never sleep, or ``kv_cache``, with which the engine
        continues.
        """
        self._ask(self._async.wake_up, tags)

    @property
    @together
    def weight_version(self) -> str:
        """The version of the weights; ``default`` until they are replaced."""
        version: str = self._ask(self._async.weight_info)["weight_version"]
        return version

    def close(self) -> None:
        """Stop all ranks and free the device; safe to call twice."""
        if self.team is not None:
            self.team.close()
        if self.team is None or self.team.leads:
            _end(self._ending, self._loop, self._async)
            self._forgotten.detach()
        self._ending.close()

    def new_call(self, *, wants_all: bool = False) -> Call:
        """Return an empty call, for programs that add requests as others end."""
        self._check_open()
        return Call(self._loop, self.outputs, self._sample, wants_all=wants_all)

    def _check_open(self) -> None:
        """Raise ``EngineDeadError`` if the engine has ended."""
        self._ending.check()
        error = self._async.engine.error
        if error is not None:
            raise again(error)

    def _ask(
        self,
        function: Callable[_Arguments, Coroutine[Any, Any, _Result]],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        self._check_open()
        try:
            return self._loop.run(function, *arguments, **named)
        except EngineDeadError as error:
            raise again(error.__cause__ or error) from None

    def _rows(
        self,
        name: str,
        items: Iterable[Any],
        is_one: bool,
        sampling_params: Sampling | Iterable[Sampling],
        lora_request: Lora,
        priority: int | Iterable[int],
        tokenization_kwargs: Mapping[str, Any] | None,
        *,
        prompt_of: Callable[[Any], Prompt] = lambda item: item,
    ) -> Rows:
        options, arrival_s = tokenization_options(tokenization_kwargs), time.monotonic()

        def make(item: Any, params: Sampling, first: int, lora: LoRARequest | None) -> tuple[EngineRequest, str | None]:
            prompt, params = prompt_of(item), SamplingParams.of(params, self._default_params)
            fields: dict[str, Any] = {
                "request_id": self._next_id(),
                "priority": first,
                "arrival_s": arrival_s,
                "adapter": self._adapter(lora, adapters),
                **options,
            }
            if waits_for_others(prompt, params):
                request = self._loop.run(self._async.prepared, prompt, params, **fields)
            else:
                request = self.input_processor.process(prompt, params, **fields)
            return request, prompt_text(prompt)

        adapters: dict[str, LoRARequest] = {}
        columns = {"sampling_params": sampling_params, "priority": priority, "lora_request": lora_request}
        return Rows(name, items, make, columns, is_one=is_one)

    def _run_of(self, rows: Rows, *, stream: bool = False, **options: Any) -> RowRun:
        window = None
        if stream or rows.size is None:
            window = max(_LEAST_WINDOW, _WINDOW_PER_SEQUENCE * self.engine.model_info.max_num_seqs)
        call = self.new_call(wants_all=window is None and options.get("on_error", "raise") == "raise")
        return RowRun(call, rows, window=window, **options)

    def _run_pooled(
        self, pooler: Pooler, made: Callable[[RequestOutput], _Result], prompts: Prompts, use_tqdm: Progress
    ) -> list[_Result]:
        self._check_open()
        batch, is_one = as_batch(prompts)

        def make(prompt: Prompt) -> tuple[EngineRequest, str | None]:
            return pooler.request(prompt, request_id=self._next_id()), None

        return self._run_of(Rows("prompts", batch, make, {}, is_one=is_one), use_tqdm=use_tqdm).results(made)

    def _complete(self, requests: Sequence[EngineRequest], use_tqdm: Progress = False) -> list[RequestOutput]:
        """Run requests that have been made."""
        run = self._run_of(Rows("prompts", requests, lambda request: (request, None), {}), use_tqdm=use_tqdm)
        return run.results()

    def _adapter(self, lora: LoRARequest | None, chosen: dict[str, LoRARequest]) -> str:
        """The name of a prompt's adapter, empty for none; loads one that is not loaded.  ``chosen`` are those of the
        call, by name."""
        if lora is None:
            return ""
        if not isinstance(lora, LoRARequest):
            kind = type(lora).__name__
            raise RequestError(
                f"lora_request is of type {kind}; it must be a LoRARequest, or one for each prompt",
                param="lora_request",
            )
        name, loaded = lora.lora_name, self.input_processor.adapters
        if name not in chosen:
            load = load_for(lora, loaded)
            if load is not None:
                self.load_lora_adapter(load["name"], load["path"], load_inplace=True)
            chosen[name] = lora
        if lora.lora_path not in ("", loaded[name]):
            raise RequestError(
                f"lora_request names {name!r} with two folders; give each adapter a name of its own",
                param="lora_request",
            )
        return name

    def _sample(self) -> None:
        is_over = self._observing is None or self._observing.done()
        if is_over and self.allocation_monitor.is_due(now_s := time.monotonic()):
            self._observing = asyncio.ensure_future(self._observe(now_s))

    async def _observe(self, now_s: float) -> None:
        with suppress(TimeoutError, EngineDeadError):
            report = await self._async.report()
            self.allocation_monitor.observe(report.stats, now_s)

    def _next_id(self) -> str:
        return f"request-{next(self._num_requests)}"


async def _nothing_to_close() -> None:
    """For a loop without an engine."""


def _launch_for(config: EngineConfig) -> Launch:
    """The launch of rank 0.  On another rank of a torchrun job this serves rank 0's engine, and ends the process."""
    launched = env.launched_rank()
    if launched is None or launched.world_size == 1:
        return spawn_service
    from tp_engine.engine import start  # imports torch, which the caller's process needs only if it is a rank
    from tp_engine.engine.service_thread import start_service_thread

    if launched.rank > 0:
        start.leave_after_engine()
        started(start.serve_rank, config).result()  # in a thread, as rank 0, without this thread's settings of torch
        raise SystemExit(0)
    start.check_ranks_stay()
    start.let_ranks_go()
    return lambda config, _is_over: start_service_thread(config)


def _end(ending: Ending, loop: LoopThread, llm: AsyncLLM) -> None:
    """Stop the engine of an ``LLM`` that is closed, forgotten, or whose program ends."""
    ending.close()
    if not ending.is_here:
        return
    if loop.is_here:  # a forgotten LLM was collected in the loop's thread
        started(loop.finish, llm.close)
    else:
        loop.finish(llm.close)
