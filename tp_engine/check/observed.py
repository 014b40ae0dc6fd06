"""What an engine answers in each set-up: tokens and log-probabilities, and what its layers computed.

A *set-up* is a way in which one request can run: alone, in a batch, with a cached prefix, ...  All must give what the
oracle gives.  Those of the user's own engine come first; each of the others is an engine of its own, whose options
differ as the table ``OTHERS`` says.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.api.llm import LLM
from tp_engine.check.prompts import CheckPrompt
from tp_engine.errors import ConfigError, EngineDeadError, MemoryBudgetError, RequestError
from tp_engine.outputs import Logprob, RequestOutput
from tp_engine.sampling_params import SamplingParams

ALTERNATIVES = 4  # likeliest tokens compared at each position, beside the token itself
_TIER_GIB = 0.05
CHUNK = 32

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's answer, and the log-probabilities that the engine gives along the sequence of both.

    ::

        sequence (n,)               prompt, then answer
        alternatives (n, m)         token ids after each position; rows without any are -1
        logprobs (n, m)             theirs by the engine
    """

    prompt: CheckPrompt
    token_ids: tuple[int, ...]
    alternatives: Ids
    logprobs: Floats
    num_cached_tokens: int = 0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt.token_ids, *self.token_ids)

    @property
    def answer_logprobs(self) -> Floats:
        """(answer,): of the chosen tokens."""
        return self.logprobs[len(self.prompt.token_ids) - 1 : -1, 0]


@dataclass(frozen=True, slots=True)
class Watched:
    """What every rank recorded of one prompt, by the names of ``LayerWatch``; ``layout`` is that of its linears."""

    prompt: CheckPrompt
    arrays: Sequence[Mapping[str, Floats]]
    layouts: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Observed:
    """All that a check needs of the engines, which are closed by then.

    ``set_ups``: name -> its answers, or why there are none.  ``configuration`` is the engine's effective one, on
    ``device``.  ``bound`` is the largest error of a log-probability that is right, once the oracle has run.
    """

    prompts: Sequence[CheckPrompt]
    set_ups: dict[str, list[Answer] | str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    watched: Watched | None = None
    configuration: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    bound: float = 0.0

    @property
    def alone(self) -> list[Answer]:
        """The answers of requests that ran alone, with log-probabilities of their prompts."""
        found = self.set_ups[ALONE]
        assert isinstance(found, list), "the first set-up"
        return found


ALONE, BATCH, CACHED = "alone", "in a batch", "cached prefix"


@dataclass(frozen=True, slots=True)
class Other:
    """A set-up with an engine of its own; ``changes`` are options, given those of the user.

    ``happened`` tells from the engine and its answers whether what it is about took place.  Each prompt runs in so many
    ``copies`` at once, and again alone if it ``repeats``.
    """

    changes: Callable[[Mapping[str, Any], Sizes], dict[str, Any] | None]
    happened: Callable[[LLM, Sequence[Answer]], bool] = lambda _llm, _answers: True
    remedy: str = ""
    repeats: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """The ``longest`` sequence, and the KV blocks that it needs in chunks of ``CHUNK`` tokens."""

    longest: int
    num_blocks: int


def _tight(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """A cache with room for the longest sequence and little more."""
    blocks = {"num_gpu_blocks_override": sizes.num_blocks + 1, "kv_cache_memory_bytes": None}
    return {**blocks, "max_model_len": sizes.longest, **_chunks(options, sizes)}


def _preempted(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    no_tier = {"kv_offloading_size": 0.0, "kv_disk_path": None, "kv_disk_size": 0.0, "kv_offloading_codec": "none"}
    return {**_tight(options, sizes), "enable_prefix_caching": False, **no_tier}


def _chunks(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    return {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "cudagraph_prefill_capture_sizes": "none"}


def _tier(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    if options.get("kv_offloading_codec", "none") != "none":
        return None
    size = max(_TIER_GIB, options.get("kv_offloading_size", 0.0))
    return {**_tight(options, sizes), "enable_prefix_caching": True, "kv_offloading_size": size}


def _speculation(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    if options.get("speculative_config"):
        return {"speculative_config": None}
    return {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})}


def _one_rank(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    return {"tensor_parallel_size": 1, "device_ids": None} if options.get("tensor_parallel_size", 1) > 1 else None


def _was_cached(_llm: LLM, answers: Sequence[Answer]) -> bool:
    return sum(one.num_cached_tokens for one in answers) > 0


OTHERS: Mapping[str, Other] = {
    "in chunks": Other(_chunks, remedy="--max-num-batched-tokens above the longest prompt"),
    "preempted": Other(
        _preempted,
        lambda llm, _answers: llm.engine.stats().num_preemptions > 0,
        remedy="more KV blocks, so that nothing is preempted",
        copies=2,
    ),
    "after a tier": Other(_tier, _was_cached, remedy="leave out --kv-offloading-size", repeats=True),
    "speculation on or off": Other(_speculation, remedy="leave out --speculative-config"),
    "one rank": Other(_one_rank, remedy="--all-reduce-backend nccl (GPUs) or gloo (CPUs)"),
    "graphs on or off": Other(
        lambda options, _sizes: {"enforce_eager": not options.get("enforce_eager", False)}, remedy="--enforce-eager"
    ),
}


def observe(
    options: Mapping[str, Any],
    prompts: Sequence[CheckPrompt],
    *,
    sizes: Sizes,
    max_tokens: int,
    quick: bool,
    with_llm: Callable[[LLM, Observed], None],
    note: Callable[[str], None],
) -> Observed:
    """Run the user's engine (``options``), then, unless it is ``quick``, the others.  ``with_llm`` is called with the
    user's engine.

    ``note`` is told what begins.  An engine that does not start, or fails, is a failure of its set-up.
    """
    observed = Observed(prompts)
    note("the engine as it is served")
    with LLM(**options) as llm:
        observed.configuration, observed.device = llm.engine.operator.configuration(), llm.engine.model_info.device
        params = _params(max_tokens, prompt_logprobs=ALTERNATIVES)
        observed.set_ups[ALONE] = [
            _answer(one, llm.generate([list(one.token_ids)], params, use_tqdm=False)[0]) for one in prompts
        ]
        note(BATCH)
        observed.set_ups[BATCH] = _ask(llm, prompts, max_tokens)
        if observed.configuration["enable_prefix_caching"]:
            note(CACHED)
            again = _ask(llm, prompts, max_tokens)
            observed.set_ups[CACHED] = again if _was_cached(llm, again) else "nothing was found in the prefix cache"
        note("layers")
        observed.watched = _watch(llm, max(prompts, key=lambda one: len(one.token_ids)))
        with_llm(llm, observed)
    for name, other in OTHERS.items():
        if quick:
            observed.set_ups[name] = "not in --quick"
            continue
        changes = other.changes(options, sizes)
        if changes is None:
            observed.set_ups[name] = "does not apply to these options"
            continue
        note(name)
        try:
            found = _run_other(other, {**options, **changes}, prompts, max_tokens)
            observed.set_ups[name] = found or "it did not come about with these prompts"
        except ConfigError as error:
            observed.set_ups[name] = f"these options exclude it: {error}"
        except MemoryBudgetError as error:
            observed.set_ups[name] = f"this machine has too little memory for it: {error}"
        except (RequestError, EngineDeadError, RuntimeError, OSError) as error:
            observed.failures[name] = str(error)
    return observed


def _run_other(
    other: Other, options: dict[str, Any], prompts: Sequence[CheckPrompt], max_tokens: int
) -> list[Answer] | None:
    """The answers, None if what the set-up is about did not take place."""
    with LLM(**options) as llm:
        answers = _ask(llm, [*prompts] * other.copies, max_tokens)
        if other.repeats:
            answers = [_ask(llm, [one], max_tokens)[0] for one in prompts]
        return answers if other.happened(llm, answers) else None


def _params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=ALTERNATIVES, detokenize=False, **more
    )


def _ask(llm: LLM, prompts: Sequence[CheckPrompt], max_tokens: int) -> list[Answer]:
    outputs = llm.generate([list(one.token_ids) for one in prompts], _params(max_tokens), use_tqdm=False)
    return [_answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def _answer(prompt: CheckPrompt, output: RequestOutput) -> Answer:
    sample = output.outputs[0]
    tokens = tuple(sample.token_ids)
    of_prompt: list[dict[int, Logprob] | None] = list((output.prompt_logprobs or [None] * len(prompt.token_ids))[1:])
    of_answer: list[dict[int, Logprob] | None] = list(sample.logprobs or [])
    rows = [*of_prompt, *of_answer]
    known = [{token: one.logprob for token, one in (row or {}).items()} for row in rows]
    return answer_of(prompt, tokens, known, output.num_cached_tokens)


def answer_of(
    prompt: CheckPrompt, tokens: Sequence[int], rows: Sequence[Mapping[int, float]], num_cached_tokens: int
) -> Answer:
    """Return the answer with the log-probabilities by token ids that ``rows`` has for each position but the last."""
    following = (*prompt.token_ids, *tokens)[1:]
    alternatives = np.full((len(following) + 1, ALTERNATIVES + 1), -1, np.int64)
    logprobs = np.zeros(alternatives.shape, np.float32)
    for position, (row, token) in enumerate(zip(rows, following, strict=True)):
        others = [other for other in row if other != token][:ALTERNATIVES]
        for column, other in enumerate((token, *others) if token in row else ()):
            alternatives[position, column], logprobs[position, column] = other, row[other]
    return Answer(prompt, tuple(tokens), alternatives, logprobs, num_cached_tokens)


def _watch(llm: LLM, prompt: CheckPrompt) -> Watched:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    order = llm.engine.operator.order
    with tempfile.TemporaryDirectory(prefix="tp_engine-check-") as folder:
        order("watch_layers", {})
        llm.generate([list(prompt.token_ids)], params, use_tqdm=False)
        order("watch_layers", {"folder": folder})
        arrays, layouts = [], []
        for rank in range(llm.engine.model_info.tensor_parallel_size):
            with np.load(Path(folder) / f"rank{rank}.npz") as file:
                layouts.append(json.loads(str(file["layout"])))
                arrays.append({name: file[name] for name in file.files if name != "layout"})
    return Watched(prompt, arrays, layouts)
