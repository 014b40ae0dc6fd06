"""Tasks of lm-eval (extra: eval), asked through the same server and judged as all others.

lm-eval renders prompts, and finds the answer in what is generated; its metric says whether the answer is right.  A task
whose questions are all generated is asked as chats, one with log-probabilities as completions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from tp_engine.apps.eval.asking import Asker
from tp_engine.apps.eval.judging import EvalOutcome, TaskResult
from tp_engine.apps.eval.tasks import HarnessTask
from tp_engine.errors import ConfigError, did_you_mean, shown

_METRICS = ("exact_match", "acc", "acc_norm", "prompt_level_strict_acc", "pass@1", "em")
_FILTERS = ("flexible-extract", "none")
_MOST_TOKENS = 256  # as lm-eval's own models, where a task does not say


class ServedLM(LM):  # type: ignore[misc]
    """lm-eval's model: the one behind ``asker``."""

    def __init__(self, asker: Asker) -> None:
        super().__init__()
        self._asker = asker

    @property
    def tokenizer_name(self) -> str:
        """For keys of lm-eval's caches."""
        return self._asker.model

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the chat as JSON: the server applies the template."""
        return json.dumps(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The server's own."""
        return ""

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what follows each context, up to the texts in ``until``."""
        return list(self._asker.ask_all(self._generate, [request.args for request in requests]))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return how likely each continuation is, and whether it is the likeliest."""
        pairs = [request.args for request in requests]
        asked = self._asker.ask_all(lambda pair: self._asker.continuation(*pair), pairs)
        return [(found.logprob, found.is_likeliest) for found in asked]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return how likely each text is; one that is longer than the model's context is an error of the server."""
        texts = [request.args[0] for request in requests]
        return [found.logprob for found in self._asker.ask_all(lambda text: self._asker.continuation("", text), texts)]

    def _generate(self, arguments: tuple[str, Mapping[str, Any]]) -> str:
        context, options = arguments
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else [one for one in until if one]
        max_tokens = int(options.get("max_gen_toks") or options.get("max_tokens") or _MOST_TOKENS)
        more: dict[str, Any] = {"stop": stop} if stop else {}
        if options.get("temperature"):
            more["temperature"] = options["temperature"]
        if not self._asker.as_chat:
            return self._asker.completion(context, max_tokens, more)
        return self._asker.chat(json.loads(context), max_tokens, more)


def find(name: str, include_path: str | None) -> TaskManager:
    """Return lm-eval's list of tasks, with ``name`` in it; raises ``ConfigError``."""
    manager = _tasks_in(include_path)
    if name not in manager.all_tasks:
        raise ConfigError(
            f"tasks names {shown(name)}; lm-eval has none of this name{did_you_mean(name, manager.all_tasks)}"
        )
    return manager


@functools.cache
def _tasks_in(include_path: str | None) -> TaskManager:
    """Reading the list of lm-eval's thousands of tasks takes seconds."""
    return TaskManager(include_path=include_path)


def ask(asker: Asker, task: HarnessTask, *, num_fewshot: int | None, limit: int | None) -> TaskResult:
    """Ask the questions of a task or a group; raises ``ServerError``, and ``ConfigError`` for a task whose answers are
    not right or wrong."""
    name, manager, began_s = task.name, find(task.name, task.include_path), time.monotonic()
    is_chat = asker.as_chat and _is_generated(manager.load([name])["tasks"])
    found = simple_evaluate(
        ServedLM(dataclasses.replace(asker, as_chat=is_chat)),
        tasks=[name],
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        bootstrap_iters=0,
        task_manager=manager,
    )
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = found["samples"]
    outcomes = [one for part, of_part in samples.items() for one in _outcomes(part, of_part, len(samples) > 1)]
    hashes = sorted(f"{one['doc_hash']} {one['target_hash']}" for of_part in samples.values() for one in of_part)
    return TaskResult(
        name=name,
        digest=hashlib.sha256("\n".join(dict.fromkeys(hashes)).encode()).hexdigest()[:16],
        settings={"chat": is_chat, "num_fewshot": num_fewshot, "sampling": dict(asker.sampling)},
        outcomes=outcomes,
        seconds=time.monotonic() - began_s,
    )


def _is_generated(tasks: Mapping[str, Any]) -> bool:
    return all(task.OUTPUT_TYPE == "generate_until" for task in tasks.values())


def _outcomes(task: str, samples: Sequence[Mapping[str, Any]], of_several: bool) -> Iterator[EvalOutcome]:
    """What each question's answer is, by the metric and the filter that most tasks have."""
    metric = next((one for one in _METRICS if one in samples[0]["metrics"]), None)
    if metric is None:
        raise ConfigError(
            f"{task} of lm-eval has the metrics {', '.join(samples[0]['metrics'])}, none of which says of an answer "
            f"whether it is right ({', '.join(_METRICS)}); leave it out"
        )
    filters = list(dict.fromkeys(one["filter"] for one in samples))
    wanted = next((one for one in _FILTERS if one in filters), filters[0])
    for sample in samples:
        if sample["filter"] == wanted:
            place = f"{task}/{sample['doc_id']}" if of_several else str(sample["doc_id"])
            yield EvalOutcome(place, float(sample[metric]) == 1, str(sample["filtered_resps"][0]))
