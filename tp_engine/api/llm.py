"""``LLM``: batch inference in this process, under vLLM's names."""

from __future__ import annotations

import functools
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Unpack, cast

from tqdm import tqdm

from tp_engine import env
from tp_engine.api.beam_search import BeamSearch, beam_search_output, one_token, run_searches
from tp_engine.api.engine_options import ChatTemplateOptions, EngineOptions, read_options
from tp_engine.api.input_processor import InputProcessor, Prompt, prompt_text
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.output_streams import Outputs, Processed
from tp_engine.api.pooling import Pooler, PoolingLike
from tp_engine.api.scoring import ScorePairs, paired
from tp_engine.closing import Closing
from tp_engine.config import DEMO_MODEL
from tp_engine.engine.admin_commands import act
from tp_engine.engine.engine import Engine
from tp_engine.engine.staged_tensors import NamedTensors, StagedTensors
from tp_engine.engine.start import (
    check_config,
    check_ranks_stay,
    leave_after_engine,
    let_ranks_go,
    serve_rank,
    start_engine,
)
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import RequestError
from tp_engine.lora import LoRARequest, load_for
from tp_engine.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import BeamSearchParams, SamplingParams
from tp_engine.sched.allocation_monitor import AllocationMonitor
from tp_engine.structured_outputs import PARAM

_MONITOR_S = 0.25

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Sampling: TypeAlias = SamplingParams | Mapping[str, Any] | None
"""How a prompt is sampled: None for the model's defaults."""
Lora: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each."""
Prompts: TypeAlias = Prompt | Sequence[Prompt]
"""One prompt or many."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _one_at_a_time(method: _Method) -> _Method:
    """Let a call wait until no other thread is in a method of the same ``LLM``."""

    @functools.wraps(method)
    def call(llm: LLM, *args: Any, **kwargs: Any) -> Any:
        with llm._lock:
            return method(llm, *args, **kwargs)

    return cast("_Method", call)


class LLM(Closing):
    """A model on one or more ranks, driven by the calling thread; calls of several threads wait for each other.

    ``model`` is a folder or a hub name, the demo model by default; ``options`` are those of the server's engine, with
    vLLM's names (docs/flags_engine.md).  In a plain script this object starts and stops the other ranks.  Under
    torchrun it adopts those of the job: the script continues on rank 0; on every other rank the constructor serves
    until rank 0 closes, and then ends the process with exit code 0, so a job has one ``LLM``.  Use it as a context
    manager, or call ``close()``.

    ``allocation_monitor`` samples the use of the KV pool four times per second while requests run.  ``engine.report()``
    tells of memory, tiers and ranks.  The rest of ``engine``, ``input_processor``, ``outputs`` and ``step`` are what
    this class is made of, for programs that drive an engine step by step; they may change in any version.
    """

    def __init__(self, model: str | PathLike[str] = str(DEMO_MODEL), **options: Unpack[EngineOptions]) -> None:
        config, defaults, chats = read_options("LLM", model, options)
        launched = env.launched_rank()
        if launched is not None and launched.rank > 0:
            leave_after_engine()
            serve_rank(config)
            raise SystemExit(0)
        check_ranks_stay()
        effective = check_config(config).config
        tokenizer = load_tokenizer(effective.tokenizer_source, effective.revision)
        self._default_params = defaults.params(effective.model, effective.revision)
        self.engine: Engine = start_engine(config)
        let_ranks_go()
        self._close = weakref.finalize(self, self.engine.close)
        self.input_processor = InputProcessor(self.engine.model_info, tokenizer)
        self.input_processor.chat = ChatFormat(tokenizer, chats)
        self.outputs = Outputs(tokenizer)
        self.allocation_monitor = AllocationMonitor(interval_s=_MONITOR_S)
        self._num_requests = 0
        self._lock = threading.RLock()

    def get_tokenizer(self) -> Any | None:
        """Return the tokenizer, of the library transformers; None for a model without one."""
        return self.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return those of requests that give none: of the model's generation_config.json, unless options say
        otherwise."""
        return self._default_params

    @_one_at_a_time
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling | Sequence[Sampling] = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        A prompt is text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; these two may have
        ``multi_modal_data`` too: ``{"image": image}``, or a list, and ``mm_processor_kwargs`` (docs/images.md).
        ``sampling_params`` may be a mapping of fields; None means ``get_default_sampling_params()``.  One serves all
        prompts; a list must have one for each; so with ``lora_request``, the adapter, and ``priority``.  Raises
        ``RequestError`` for a bad prompt before any prompt runs.
        """
        batch = _as_batch(prompts)
        given = _for_each("sampling_params", sampling_params, len(batch))
        params = [SamplingParams.of(one, self._default_params) for one in given]
        priorities = _for_each("priority", priority, len(batch))
        adapters = self._adapters_of(lora_request, len(batch))
        arrival_s = time.monotonic()
        requests = [
            self.input_processor.process(
                prompt, one, request_id=self._next_id(), priority=first, arrival_s=arrival_s, adapter=adapter
            )
            for prompt, one, first, adapter in zip(batch, params, priorities, adapters, strict=True)
        ]
        return self._run(requests, [prompt_text(prompt) for prompt in batch], use_tqdm)

    @_one_at_a_time
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling | Sequence[Sampling] = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
        priority: int | Sequence[int] = 0,
        **template_options: Unpack[ChatTemplateOptions],
    ) -> list[RequestOutput]:
        """Complete one conversation, or a list of them, through the model's chat template."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prompts = [self.input_processor.chat_prompt(one, **template_options) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    @_one_at_a_time
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

        Beams share their blocks through the prefix cache: leave ``enable_prefix_caching`` on, or each token of each
        beam costs a pass over all tokens before it.  At most ``concurrency_limit`` prompts are searched at a time, and
        at most as many as the KV cache holds.  Raises ``RequestError`` for a bad prompt before any prompt runs.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit is {concurrency_limit}; it must be at least 1, or None")
        arrival_s, model = time.monotonic(), self.engine.model_info
        searches, batch = [], _as_batch(prompts)
        for prompt, adapter in zip(batch, self._adapters_of(lora_request, len(batch)), strict=True):
            request = self.input_processor.process(
                prompt, one_token(params), request_id=self._next_id(), arrival_s=arrival_s, adapter=adapter
            )
            searches.append(BeamSearch(request, params, model))

        def generate(requests: list[EngineRequest]) -> list[RequestOutput]:
            return self._run(requests, [None] * len(requests), use_tqdm=False)

        run_searches(searches, generate, model, max_searches=concurrency_limit or len(searches), use_tqdm=use_tqdm)
        return [beam_search_output(search, self.outputs.decoder) for search in searches]

    @_one_at_a_time
    def embed(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt, in their order, by a model for embeddings (docs/embeddings.md).

        Raises ``RequestError`` for a bad prompt before any prompt runs, and for a model that gives no embeddings.
        """
        pooler = Pooler.of(self.input_processor, pooling_params, "embed")
        return [pooler.embedding(output) for output in self._run_pooled(pooler, prompts, use_tqdm)]

    @_one_at_a_time
    def classify(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return how likely each label of a classifier is for every prompt, in their order (docs/classifiers.md)."""
        pooler = Pooler.of(self.input_processor, pooling_params, "classify")
        return [pooler.classification(output) for output in self._run_pooled(pooler, prompts, use_tqdm)]

    @_one_at_a_time
    def reward(
        self, prompts: Prompts, pooling_params: PoolingLike = None, *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what a reward model gives every prompt: its score, or, if it judges steps, those of each token."""
        pooler = Pooler.of_rewards(self.input_processor, pooling_params)
        return [pooler.pooled(output) for output in self._run_pooled(pooler, prompts, use_tqdm)]

    @_one_at_a_time
    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingLike = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what a task (``embed``, ``classify``, ``token_classify``; by default the model's own) gives every
        prompt, as arrays."""
        pooler = Pooler.of(self.input_processor, pooling_params, pooling_task)
        return [pooler.pooled(output) for output in self._run_pooled(pooler, prompts, use_tqdm)]

    @_one_at_a_time
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document answers its query, by a reranker or a model for embeddings: one query for all
        documents, or one for each.

        ``instruction`` tells a reranker what relevant means.  Raises ``RequestError`` before anything runs.
        """
        pairs = paired(queries, documents)
        scored = ScorePairs.of(self.input_processor, pairs, request_id=self._next_id(), instruction=instruction)
        return scored.outputs(self._run(scored.requests, [None] * len(scored.requests), use_tqdm))

    @_one_at_a_time
    def step(self) -> Processed:
        """Return one step of the engine, and what it adds to the requests; those that stop strings ended are
        aborted."""
        processed = self.outputs.process(self.engine.step())
        if processed.aborts:
            self.engine.abort(processed.aborts)
        return processed

    @_one_at_a_time
    def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Load the PEFT adapter in the folder ``path`` under ``name``.

        ``RequestError``, and nothing has changed, if it can not be served, or if the name is taken and not
        ``load_inplace``.
        """
        self._act("load_lora_adapter", name=name, path=path, replaces=load_inplace)
        self.input_processor.adapters[name] = path

    @_one_at_a_time
    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter; ``RequestError`` for an unknown name."""
        self._act("unload_lora_adapter", name=name)
        self.input_processor.adapters.pop(name, None)

    @_one_at_a_time
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; while requests run, change nothing and return False."""
        return self.engine.operator.reset_prefix_cache()

    @_one_at_a_time
    def reset_mm_cache(self) -> None:
        """Forget all embeddings of images."""
        self.engine.operator.reset_mm_cache()

    def update_weights(
        self, tensors: NamedTensors, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """Run with other weights from now on: all tensors of a checkpoint of this model, by their names in it.

        All ranks take them or none: ``RequestError`` names a tensor that is missing, unexpected or misshapen, and
        nothing has changed.  Returns the ``weight_version``, by default the number of the update; what the prefix cache
        has of other weights is not found any more, and ``flush_cache`` frees it.
        """
        with StagedTensors(tensors) as staged:
            return self._update_weights(weight_version, flush_cache, files=staged.files)

    def update_weights_from_disk(
        self, path: str | Path, *, weight_version: str | None = None, flush_cache: bool = False
    ) -> str:
        """Do as ``update_weights``, from the folder of a checkpoint that all ranks can read."""
        return self._update_weights(weight_version, flush_cache, folder=str(path))

    def pause(self, mode: str = "keep") -> None:
        """Run no step until ``resume``: unfinished requests, of a script that calls ``step``, wait and are computed
        again (``keep``), or end (``abort``)."""
        self._act("pause", mode=mode)

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._act("resume")

    def sleep(self, level: int = 1) -> None:
        """Do as ``pause``; at level 1 all cached prefixes are forgotten, and the memory of the KV cache is free."""
        self._act("sleep", level=level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Go on after ``sleep``; ``RequestError``, and the engine still sleeps, if there is no memory for the cache.

        With ``tags`` only what they name is awake: ``weights``, which have not slept, or ``kv_cache``, with which the
        engine goes on.
        """
        self._act("wake_up", tags=tags)

    @property
    def weight_version(self) -> str:
        """The version of the weights; ``default`` for those of the start."""
        version: str = self._act("weight_info")["weight_version"]
        return version

    @_one_at_a_time
    def close(self) -> None:
        """Stop all ranks and free the device; safe to call twice."""
        self._close()

    @_one_at_a_time
    def _act(self, action: str, **arguments: Any) -> dict[str, Any]:
        with _interrupts_held():
            return act(self.engine.operator, action, arguments)

    def _update_weights(self, weight_version: str | None, flush_cache: bool, **source: Any) -> str:
        done = self._act("update_weights", weight_version=weight_version, flush_cache=flush_cache, **source)
        version: str = done["weight_version"]
        return version

    def _run_pooled(self, pooler: Pooler, prompts: Prompts, use_tqdm: bool) -> list[RequestOutput]:
        requests = [pooler.request(prompt, request_id=self._next_id()) for prompt in _as_batch(prompts)]
        return self._run(requests, [None] * len(requests), use_tqdm)

    def _adapters_of(self, lora: Lora, num_prompts: int) -> list[str]:
        """The name of each prompt's adapter, empty for none; those that are not loaded are loaded now."""
        wanted: list[LoRARequest | None] = _for_each("lora_request", lora, num_prompts)
        if wrong := next((one for one in wanted if not isinstance(one, (LoRARequest, type(None)))), None):
            kind = type(wrong).__name__
            raise RequestError(
                f"lora_request is of type {kind}; it must be a LoRARequest, or one for each prompt",
                param="lora_request",
            )
        for one in dict.fromkeys(wanted):
            load = None if one is None else load_for(one, self.input_processor.adapters)
            if load is not None:
                self.load_lora_adapter(load["name"], load["path"], load_inplace=True)
        loaded = self.input_processor.adapters
        if other := next((one for one in wanted if one and one.lora_path not in ("", loaded[one.lora_name])), None):
            raise RequestError(
                f"lora_request names {other.lora_name!r} with two folders; give each adapter a name of its own",
                param="lora_request",
            )
        return ["" if one is None else one.lora_name for one in wanted]

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests - 1}"

    def _run(
        self, requests: Sequence[EngineRequest], texts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with _interrupts_held() as take_interrupt:
            self._add_all(requests, texts)
            progress = tqdm(total=len(requests), desc="requests", unit="", disable=not use_tqdm)
            num_tokens, started_s = 0, time.monotonic()
            try:
                while self.engine.has_unfinished:
                    take_interrupt()
                    processed = self.step()
                    if self.allocation_monitor.is_due(now_s := time.monotonic()):
                        self.allocation_monitor.observe(self.engine.stats(), now_s)
                    num_tokens += processed.num_tokens
                    if processed.finished:
                        finished |= {one.request_id: one for one in processed.finished}
                        rate = num_tokens / (time.monotonic() - started_s)
                        progress.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
                        progress.update(len(processed.finished))
            except BaseException:
                self._forget(requests)
                raise
            finally:
                progress.close()
        return [finished[request.request_id] for request in requests]

    def _add_all(self, requests: Sequence[EngineRequest], texts: Sequence[str | None]) -> None:
        """Add all or none: a request that can never fit is refused before another has run."""
        if self.engine.operator.is_asleep:
            raise RequestError("the engine sleeps, and requests would never end; call wake_up() first")
        if self.engine.operator.is_paused:
            raise RequestError(
                "the engine is paused, and requests would never end; call resume() first, or wake_up() after sleep()"
            )
        for request, text in zip(requests, texts, strict=True):
            try:
                self.engine.add_request(request)
            except RequestError:
                self._forget(requests)
                raise
            self.outputs.add(request, text)
        for failed in self.engine.compile_grammars():
            self._forget(requests)
            if failed.error_code is None:
                raise RuntimeError(f"a grammar could not be compiled: {failed.error}")
            raise RequestError(str(failed.error), param=PARAM, code=failed.error_code)

    def _forget(self, requests: Sequence[EngineRequest]) -> None:
        """Abort and forget all, after an error or Ctrl-C, so that the next call finds nothing of them."""
        self.engine.abort([request.request_id for request in requests])
        for request in requests:
            self.outputs.forget(request.request_id)


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """A context in which a first Ctrl-C waits for its end, or for a call of what it yields: a step that is cut short
    ends the engine.  A second one does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    held: list[tuple[Any, ...]] = []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def hold(*interrupt: Any) -> None:
        if held:
            handler(*interrupt)
        held.append(interrupt)

    def take() -> None:
        if held:
            handler(*held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield take
    finally:
        signal.signal(signal.SIGINT, handler)
        take()


def _as_batch(prompts: Prompts) -> list[Prompt]:
    """One prompt or many; a flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        kind = type(prompts).__name__
        raise RequestError(f"prompts is of type {kind}; it must be a prompt, or a list of prompts", param="prompts")
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], int) else batch  # a flat list of ids is one prompt


def _for_each(name: str, given: Any, num_prompts: int) -> list[Any]:
    """One value for all prompts, or one for each."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"{len(given)} {name} for {num_prompts} prompts; give one for all, or one for each", param=name
        )
    return list(given)
