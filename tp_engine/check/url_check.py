"""``tp-engine check --url URL --model MODEL``: is what a server answers what the model's checkpoint says?

The server is asked as any client asks it; the oracle reads the checkpoint here, and is the one of ``check MODEL``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.check.behaviour import eos_ids
from tp_engine.check.judged import Judge, judged
from tp_engine.check.observed import ALONE, BATCH, CACHED, Answer, Observed
from tp_engine.check.oracle import Oracle, check_oracle_device
from tp_engine.check.passes import Passed, questions, run_pass
from tp_engine.check.prompts import (
    CHATS,
    NO_TOOLS,
    PROMPT_MEANING,
    TEXTS,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    CheckPrompt,
    chat_ids,
    differing_prompt,
    follows_weather_schema,
    make_prompts,
    tool_chat_ids,
)
from tp_engine.check.report import CheckFinding, CheckReport, describe_environment
from tp_engine.check.rounding import Rounding, rounding_of
from tp_engine.check.served import NotShownError, ServedModel
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.hf_overrides import parse_overrides
from tp_engine.model_config import load_model_config
from tp_engine.model_config.source import resolve_model_folder

CHATTED = "chats"
ENGINE_OPTIONS = ("dtype", "kv_cache_dtype", "quantization", "revision", "hf_overrides")
"""Options of an engine that say what a server computes."""

_AT_ONCE = 8
_QUICK_LONG, _LONG = 160, 512
_QUICK_TOKENS, _TOKENS = 8, 24
_PUSH = 100
_SHAPED_TOKENS = 128
_PROMPT_REMEDY = "the server's tokenizer and chat template, beside those of the original model"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlCheck:
    """What to check: the server at ``url``, which should serve ``model`` (a folder or a hub name) as ``dtype``.

    ``name`` is the model's name there (None: the server's first).  ``kv_cache_dtype`` and ``quantization`` say how the
    server rounds, where it does more than the checkpoint says.
    """

    url: str
    model: str
    name: str | None = None
    api_key: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    revision: str | None = None
    hf_overrides: str | None = None
    quick: bool = False
    timeout_s: float = 300.0
    oracle_device: str = "cpu"
    note: Note = lambda _text: None
    note_layer: Callable[[], None] = lambda: None

    def run(self) -> CheckReport:
        """Return the report; what the server does not show is skipped, with the reason."""
        check_oracle_device(self.oracle_device)
        folder = resolve_model_folder(self.model, self.revision)
        client = ServerClient(self.url, api_key=self.api_key, timeout_s=self.timeout_s)
        findings: list[CheckFinding] = []
        try:
            tokenizer = load_tokenizer(str(folder))
            served = ServedModel(client, client.model(self.name), tokenizer)
            findings += self._check(served, folder, tokenizer)
        except (ServerError, OSError) as error:
            detail = f"the server can not be checked: {error}"
            findings.append(CheckFinding.not_checked("server", detail))
        subject = f"{self.url}, beside {self.model}"
        return CheckReport(subject=subject, findings=tuple(findings), environment=describe_environment())

    def _check(self, served: ServedModel, folder: Path, tokenizer: Any | None) -> Iterator[CheckFinding]:
        yield from _timed("tokens", _check_tokens, served, tokenizer)
        yield from _timed("chat template", _check_template, served, tokenizer)
        self.note("answers of the server")
        observed = self._observe(served, folder, tokenizer)
        if not served.shows_prompts and isinstance(observed.set_ups.get(ALONE), list):
            yield CheckFinding.skipped(
                "prompts", "the server shows no log-probabilities of prompts; those of answers are compared"
            )
        yield from self._judge(folder, observed)
        self.note("ends, JSON and tools")
        yield from _timed("end of sequence", _check_ends, served, folder)
        yield from _timed("JSON by schema", _check_json, served)
        yield from _timed("tool call", _check_call, served, tokenizer)

    def _observe(self, served: ServedModel, folder: Path, tokenizer: Any | None) -> Observed:
        spec, _ = load_model_config(str(folder))
        max_tokens = _QUICK_TOKENS if self.quick else _TOKENS
        room = max(8, int(spec.max_position) - max_tokens - 2)
        prompts = make_prompts(
            tokenizer,
            vocab_size=spec.vocab_size,
            long_len=min(room, _QUICK_LONG if self.quick else _LONG),
            max_len=room,
            quick=self.quick,
            has_template=bool(getattr(tokenizer, "chat_template", None)),
        )
        chats = [one for one in prompts if one.messages]
        observed = Observed(prompts)
        answer = partial(served.answer, max_tokens=max_tokens)
        of_prompts, of_chats = partial(answer, of_prompt=True), partial(served.chat, max_tokens=max_tokens)
        set_ups: dict[str, Callable[[], list[Answer] | str]] = {
            ALONE: lambda: _one_by_one(of_prompts, prompts),
            BATCH: lambda: _at_once(answer, prompts),
            CACHED: lambda: _one_by_one(answer, prompts),
            CHATTED: lambda: _one_by_one(of_chats, chats),
        }
        for name, ask in set_ups.items():
            try:
                observed.set_ups[name] = ask()
            except ServerError as error:
                if error.status is None:
                    raise
                observed.failures[name] = f"status {error.status}: {error}"
        return observed

    def _judge(self, folder: Path, observed: Observed) -> Iterator[CheckFinding]:
        asked = questions(observed)
        if not asked:
            yield CheckFinding.not_checked(
                "answers",
                next((one for one in observed.set_ups.values() if isinstance(one, str)), "there are none"),
            )
            return
        if isinstance(reason := observed.set_ups.get(ALONE, "it fails"), str):
            yield CheckFinding.skipped("completions", reason)  # a server of chats alone: bounds follow from these
            observed.set_ups[ALONE] = next(one for one in observed.set_ups.values() if isinstance(one, list))
        spec, _ = load_model_config(str(folder))
        dtype = spec.dtype if self.dtype == "auto" else self.dtype
        overrides = parse_overrides(self.hf_overrides)
        self.note("the oracle: transformers in float32, layer by layer")
        with Oracle(folder, device=self.oracle_device, overrides=overrides) as oracle:
            exact = run_pass(oracle, asked, None, self.note_layer)
            quantization = oracle.quantization
        cache = dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        options = {"dtype": dtype, "kv_cache_dtype": cache, "quantization": self.quantization}
        rounding = rounding_of(options, quantization, self.oracle_device)

        def run_with(rounding: Rounding) -> Passed:
            self.note(f"its twin: transformers in {str(rounding.dtype).removeprefix('torch.')}")
            with Oracle(folder, rounding=rounding, device=self.oracle_device, overrides=overrides) as other:
                return run_pass(other, asked, None, self.note_layer)

        twin = None if rounding.is_exact else run_with(rounding)
        has_experts = any(layer.experts is not None for layer in spec.layers)
        judge = Judge(
            observed=observed,
            asked=asked,
            exact=exact,
            twin=twin,
            has_experts=has_experts,
            is_rough=has_experts or rounding.is_rough,
        )
        yield from judged(judge, rounding, run_with, Judge.set_ups)[1]


def _one_by_one(answer: Callable[[CheckPrompt], Answer], prompts: Sequence[CheckPrompt]) -> list[Answer] | str:
    """The answers that the server shows; the reason if it shows none."""
    found, reason = [], "the model has no chat template"
    for prompt in prompts:
        try:
            found.append(answer(prompt))
        except NotShownError as error:
            reason = str(error)
    return found or reason


def _at_once(answer: Callable[[CheckPrompt], Answer], prompts: Sequence[CheckPrompt]) -> list[Answer] | str:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        parts = list(pool.map(lambda one: _one_by_one(answer, [one]), prompts))
    shown = [one for part in parts if isinstance(part, list) for one in part]
    return shown or next(part for part in parts if isinstance(part, str))


def _timed(name: str, check: Callable[..., Iterator[CheckFinding]], *arguments: Any) -> Iterator[CheckFinding]:
    """The findings of one check; one that the server refuses is skipped, and the others go on."""
    begun_s = time.monotonic()
    try:
        for one in check(name, *arguments):
            yield replace(one, seconds=time.monotonic() - begun_s)
    except NotShownError as error:
        yield CheckFinding.skipped(name, str(error))
    except ServerError as error:
        if error.status is None:
            raise
        yield CheckFinding.skipped(name, f"the server refuses the request (status {error.status}): {error}")


def _check_tokens(name: str, served: ServedModel, tokenizer: Any | None) -> Iterator[CheckFinding]:
    if tokenizer is None:
        yield CheckFinding.skipped(name, "the model has no tokenizer")
        return
    try:
        for key, text in TEXTS.items():
            expected, found = tokenizer(text)["input_ids"], served.token_ids(text)
            if found != expected:
                yield differing_prompt(name, f"text {key!r}", found, expected, tokenizer, _PROMPT_REMEDY)
                return
        yield CheckFinding.right(name, f"{len(TEXTS)} texts have the tokens of transformers' tokenizer, by /tokenize")
    except NotShownError as reason:
        counts = {key: served.num_prompt_tokens("/v1/completions", {"prompt": text}) for key, text in TEXTS.items()}
        expected_counts = {key: len(tokenizer(text)["input_ids"]) for key, text in TEXTS.items()}
        yield _counted(name, f"{reason}", counts, expected_counts)


def _check_template(name: str, served: ServedModel, tokenizer: Any | None) -> Iterator[CheckFinding]:
    if not getattr(tokenizer, "chat_template", None):
        yield CheckFinding.skipped(name, "the model has no chat template")
        return
    chats = {key: chat_ids(tokenizer, messages) for key, messages in CHATS.items()}
    expected = {key: ids for key, ids in chats.items() if ids is not None}
    try:
        for key, ids in expected.items():
            found = served.chat_token_ids(CHATS[key])
            if found != ids:
                yield differing_prompt(name, key, found, ids, tokenizer, _PROMPT_REMEDY)
                return
        yield CheckFinding.right(name, f"{len(expected)} chats have the tokens of transformers' apply_chat_template")
    except NotShownError as reason:
        counts = {
            key: served.num_prompt_tokens("/v1/chat/completions", {"messages": list(CHATS[key])}) for key in expected
        }
        yield _counted(name, f"{reason}", counts, {key: len(ids) for key, ids in expected.items()})


def _counted(name: str, reason: str, found: Mapping[str, int | None], expected: Mapping[str, int]) -> CheckFinding:
    if any(count is None for count in found.values()):
        return CheckFinding.skipped(name, f"{reason}, and its answers do not tell usage.prompt_tokens")
    wrong = next((key for key in expected if found[key] != expected[key]), None)
    if wrong is None:
        return CheckFinding.right(
            name, f"{reason}; usage.prompt_tokens of {len(expected)} requests is transformers' number"
        )
    return CheckFinding.wrong(
        name,
        f"{wrong}: usage.prompt_tokens is {found[wrong]}, transformers has {expected[wrong]}",
        place=f"request {wrong!r}",
        meaning=PROMPT_MEANING,
        remedy=_PROMPT_REMEDY,
    )


def _check_ends(name: str, served: ServedModel, folder: Path) -> Iterator[CheckFinding]:
    known = sorted(eos_ids(folder))
    if not known:
        yield CheckFinding.skipped(name, "the model names no token that ends a sequence")
        return
    for token in known:
        body = {"prompt": "The harbour", "max_tokens": 8, "logit_bias": {str(token): _PUSH}}
        choice = served.ask("/v1/completions", body)
        if choice.get("finish_reason") != "stop":
            yield CheckFinding.wrong(
                name,
                f"token {token} ends a sequence by the model's files; the model was made to choose it, and the "
                f"answer went on ({choice.get('finish_reason')})",
                place=f"token {token}",
                meaning="answers do not end where the model ends them: they run on until max_tokens",
                remedy="eos_token_id of the server's generation_config.json and config.json, beside the original",
            )
            return
    yield CheckFinding.right(name, f"an answer ends at each of the tokens {known}")


def _check_json(name: str, served: ServedModel) -> Iterator[CheckFinding]:
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True},
    }
    body = {
        "messages": [{"role": "user", "content": "The weather in Oslo, as JSON."}],
        "max_tokens": _SHAPED_TOKENS,
        "response_format": response_format,
    }
    choice = served.ask("/v1/chat/completions", body)
    if choice.get("finish_reason") == "length":
        yield CheckFinding.skipped(name, f"the answer is longer than {_SHAPED_TOKENS} tokens")
        return
    text = (choice.get("message") or {}).get("content")
    if follows_weather_schema(text):
        yield CheckFinding.right(name, f"the answer {text} follows its schema")
        return
    yield CheckFinding.wrong(
        name,
        f"the answer {text!r} does not follow its schema",
        place="response_format",
        meaning="structured outputs are not what clients ask for",
        remedy="the server's options of structured outputs; --reasoning-parser, if reasoning comes before the answer",
    )


def _check_call(name: str, served: ServedModel, tokenizer: Any | None) -> Iterator[CheckFinding]:
    tool = WEATHER_TOOL["function"]["name"]
    body = {
        "messages": WEATHER_QUESTION,
        "max_tokens": _SHAPED_TOKENS,
        "tools": [WEATHER_TOOL],
        "tool_choice": {"type": "function", "function": {"name": tool}},
    }
    choice = served.ask("/v1/chat/completions", body)
    if choice.get("finish_reason") == "length":
        yield CheckFinding.skipped(name, f"the call is longer than {_SHAPED_TOKENS} tokens")
        return
    message = choice.get("message") or {}
    calls = message.get("tool_calls") or []
    try:
        function = calls[0]["function"]
        is_right = function["name"] == tool and json.loads(function["arguments"])["city"] in ("Oslo", "Lima")
    except (ValueError, TypeError, LookupError):
        is_right = False
    if is_right:
        yield CheckFinding.right(name, f"a forced call comes as {tool}({calls[0]['function']['arguments']})")
        return
    came = f"a forced call of {tool} came as {str(message)[:200]}"
    if not getattr(tokenizer, "chat_template", None) or tool_chat_ids(tokenizer, WEATHER_QUESTION) is None:
        yield CheckFinding.skipped(name, f"{NO_TOOLS}; {came}")
        return
    yield CheckFinding.wrong(
        name,
        came,
        place="tool_choice",
        meaning="agents get text, or arguments that do not follow the tool's schema",
        remedy="--tool-call-parser with the format of the model, and --enable-auto-tool-choice where the server has it",
    )
