"""What an engine answers in each set-up: tokens and log-probabilities, draws, and what its layers computed.

A *set-up* is a way in which one request can run (``set_ups.py``).  All must give what the oracle gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.apps.check.answers import ALTERNATIVES, Answer, answer_of_output
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.sampling import Draws, Processed, draw, prompt_of, show_processed
from tp_engine.apps.check.set_ups import ALONE, BATCH, CACHED, OTHERS, SEVERAL, Other, Sizes, was_cached
from tp_engine.apps.check.watched import Watched, watch
from tp_engine.errors import ConfigError, EngineDeadError, MemoryBudgetError, RequestError
from tp_engine.requests.sampling_params import SamplingParams

_QUICK_DRAWS, _DRAWS = 128, 512
_NUM_SEVERAL, _SEVERAL_TOKENS, _SEED = 3, 12, 46
_PROCESSED_MODE = "processed_logprobs"


@dataclass(slots=True)
class Observed:
    """All that a check needs of the engines, which are closed by then.

    ``set_ups``: name -> its answers, or why there are none.  ``processed``: log-probabilities after filters, or why
    there are none.  ``configuration`` is the engine's effective one, on
    ``device``.  ``bound`` is the largest error of a log-probability that is right, once the oracle has run.
    """

    prompts: Sequence[CheckPrompt]
    set_ups: dict[str, list[Answer] | str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    watched: Watched | None = None
    draws: Draws | None = None
    processed: Processed | str = ""
    configuration: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    bound: float = 0.0

    @property
    def alone(self) -> list[Answer]:
        """The answers of requests that ran alone, with log-probabilities of their prompts."""
        found = self.set_ups[ALONE]
        assert isinstance(found, list), "the first set-up"
        return found


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
        observed.configuration, observed.device = llm.engine.act("describe"), llm.engine.model_info.device
        params = _params(max_tokens, prompt_logprobs=ALTERNATIVES)
        observed.set_ups[ALONE] = [
            answer_of_output(one, llm.generate([list(one.token_ids)], params, use_tqdm=False)[0]) for one in prompts
        ]
        note(BATCH)
        observed.set_ups[BATCH] = _ask(llm, prompts, max_tokens)
        if observed.configuration["enable_prefix_caching"]:
            note(CACHED)
            again = _ask(llm, [*prompts, *_crossed(prompts, sizes.block_size)], max_tokens)
            observed.set_ups[CACHED] = again if was_cached(llm, again) else "nothing was found in the prefix cache"
        note(SEVERAL)
        observed.set_ups[SEVERAL] = _ask_several(llm, prompt_of(prompts))
        note("draws")
        observed.draws = draw(llm.generate, prompt_of(prompts), _QUICK_DRAWS if quick else _DRAWS)
        if observed.configuration["logprobs_mode"] == _PROCESSED_MODE:
            observed.processed = show_processed(llm.generate, prompt_of(prompts))
        note("layers")
        longest = max(prompts, key=lambda one: len(one.token_ids))
        observed.watched = watch(
            lambda kind, arguments: llm.engine.act(kind, **arguments),
            lambda: answer_of_output(longest, llm.generate([list(longest.token_ids)], params, use_tqdm=False)[0]),
            llm.engine.model_info.tensor_parallel_size,
        )
        with_llm(llm, observed)
    if isinstance(observed.processed, str):
        observed.processed = "not in --quick" if quick else _processed(options, prompts, note)
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
            found = _run_other(other, {**options, **changes}, *_lengths(other, prompts, max_tokens, sizes))
            observed.set_ups[name] = found or "it did not come about with these prompts"
        except ConfigError as error:
            observed.set_ups[name] = f"these options exclude it: {error}"
        except MemoryBudgetError as error:
            observed.set_ups[name] = f"this machine has too little memory for it: {error}"
        except (RequestError, EngineDeadError, RuntimeError, OSError) as error:
            observed.failures[name] = str(error)
    return observed


def _processed(
    options: Mapping[str, Any], prompts: Sequence[CheckPrompt], note: Callable[[str], None]
) -> Processed | str:
    """Log-probabilities of an engine that shows them after filters; why there are none, if it does not start."""
    note("processed log-probabilities")
    try:
        with LLM(**{**options, "logprobs_mode": _PROCESSED_MODE}) as llm:
            return show_processed(llm.generate, prompt_of(prompts))
    except (ConfigError, MemoryBudgetError) as error:
        return f"these options exclude it: {error}"


def _lengths(
    other: Other, prompts: Sequence[CheckPrompt], max_tokens: int, sizes: Sizes
) -> tuple[Sequence[CheckPrompt], int]:
    """The prompts and the length of answers of a set-up."""
    if not other.is_of_blocks:
        return prompts, max_tokens
    num_prompt, num_answer = sizes.crossing(sizes.longest, 0)
    return [CheckPrompt(one.name, one.token_ids[:num_prompt]) for one in prompts], num_answer


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


def _crossed(prompts: Sequence[CheckPrompt], block_size: int) -> list[CheckPrompt]:
    """A prompt that continues one prompt's first block as another does: both parts are cached, but not together."""
    long = [one.token_ids for one in prompts if len(one.token_ids) > 2 * block_size]
    pairs = [(one, other) for one, other in pairwise(long) if one[:block_size] != other[:block_size]]
    return [CheckPrompt("crossed", (*one[:block_size], *other[block_size:])) for one, other in pairs[:1]]


def _ask_several(llm: LLM, prompt: CheckPrompt) -> list[Answer]:
    """Several answers of one request, which part from each other: they share what they do not write.

    They find nothing that was cached before: what is wrong with that is another set-up's.
    """
    params = SamplingParams(
        n=_NUM_SEVERAL, temperature=1.0, seed=_SEED, max_tokens=_SEVERAL_TOKENS, ignore_eos=True,
        logprobs=ALTERNATIVES, detokenize=False, cache_salt=SEVERAL,
    )  # fmt: skip
    [output] = llm.generate([list(prompt.token_ids)], params, use_tqdm=False)
    return [replace(answer_of_output(prompt, output, number), is_drawn=True) for number in range(_NUM_SEVERAL)]


def _ask(llm: LLM, prompts: Sequence[CheckPrompt], max_tokens: int) -> list[Answer]:
    outputs = llm.generate([list(one.token_ids) for one in prompts], _params(max_tokens), use_tqdm=False)
    return [answer_of_output(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
