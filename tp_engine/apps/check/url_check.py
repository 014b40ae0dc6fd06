"""``tp-engine check --url URL --model MODEL``: does a server answer as the model's checkpoint does?

The server is asked as any client asks it; the oracle reads the checkpoint here, and is the one of ``check MODEL``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.check.answers import Answer
from tp_engine.apps.check.behaviour import NotShownError, check_behaviour, timed
from tp_engine.apps.check.judged import Judge
from tp_engine.apps.check.observed import Observed
from tp_engine.apps.check.oracle import check_oracle_device
from tp_engine.apps.check.oracle_check import OracleCheck
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.report import CheckFinding, CheckReport, describe_environment
from tp_engine.apps.check.served import ServedModel
from tp_engine.apps.check.set_ups import ALONE, BATCH, CACHED
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.model_config import load_model_config
from tp_engine.model_config.source import resolve_model_folder

CHATTED = "chats"
ENGINE_OPTIONS = ("dtype", "kv_cache_dtype", "quantization", "revision", "hf_overrides")
"""Options of an engine that describe what a server computes."""

_AT_ONCE = 8
_QUICK_LONG, _LONG = 160, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlCheck(OracleCheck):
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
    hf_overrides: Mapping[str, Any] | None = None
    timeout_s: float = 300.0

    def run(self) -> CheckReport:
        """The report; what the server does not show is skipped, with the reason."""
        check_oracle_device(self.oracle_device)
        folder = resolve_model_folder(self.model, self.revision)
        client = ServerClient(self.url, api_key=self.api_key, timeout_s=self.timeout_s)
        findings: list[CheckFinding] = []
        try:
            tokenizer = load_tokenizer(str(folder))
            served = ServedModel(client, client.model(self.name), tokenizer)
            findings += self._check(served, folder, tokenizer)
        except (ServerError, OSError) as error:
            detail = f"the server cannot be checked: {error}"
            findings.append(CheckFinding.not_checked("server", detail))
        subject = f"{self.url}, beside {self.model}"
        return CheckReport(subject=subject, findings=tuple(findings), environment=describe_environment())

    def _check(self, served: ServedModel, folder: Path, tokenizer: Any | None) -> Iterator[CheckFinding]:
        template: dict[str, Any] | None = {} if getattr(tokenizer, "chat_template", None) else None
        self.note("tokens, ends and JSON")
        yield from check_behaviour(served, tokenizer, folder, template)
        yield from timed("tool call", served.check_call, tokenizer)
        self.note("answers of the server")
        observed = self._observe(served, folder, tokenizer)
        if not served.shows_prompts and isinstance(observed.set_ups.get(ALONE), list):
            yield CheckFinding.skipped(
                "prompts", "the server shows no log-probabilities of prompts; those of answers are compared"
            )
        yield from self._judge(folder, observed)

    def _observe(self, served: ServedModel, folder: Path, tokenizer: Any | None) -> Observed:
        spec, _ = load_model_config(str(folder))
        prompts = self.prompts(tokenizer, spec, int(spec.max_position), _QUICK_LONG if self.quick else _LONG)
        answer = partial(served.answer, max_tokens=self.max_tokens)
        of_prompts, of_chats = partial(answer, of_prompt=True), partial(served.chat, max_tokens=self.max_tokens)
        chats = [one for one in prompts if one.messages]
        observed = Observed(prompts)
        for name, ask, asked, at_once in (
            (ALONE, of_prompts, prompts, 1), (BATCH, answer, prompts, _AT_ONCE), (CACHED, answer, prompts, 1),
            (CHATTED, of_chats, chats, 1),
        ):  # fmt: skip
            try:
                observed.set_ups[name] = _answers(ask, asked, at_once)
            except ServerError as error:
                if error.status is None:
                    raise
                observed.failures[name] = f"status {error.status}: {error}"
        return observed

    def _judge(self, folder: Path, observed: Observed) -> Iterator[CheckFinding]:
        answered = [one for one in observed.set_ups.values() if isinstance(one, list)]
        if not answered:
            reasons = (one for one in observed.set_ups.values() if isinstance(one, str))
            yield CheckFinding.not_checked("answers", next(reasons, "there are none"))
            return
        if isinstance(reason := observed.set_ups.get(ALONE, "it fails"), str):
            yield CheckFinding.skipped("completions", reason)  # a server of chats alone: bounds follow from these
            observed.set_ups[ALONE] = answered[0]
        spec, _ = load_model_config(str(folder))
        dtype = spec.dtype if self.dtype == "auto" else self.dtype
        cache = dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        observed.configuration = {"dtype": dtype, "kv_cache_dtype": cache, "quantization": self.quantization}
        observed.device = self.oracle_device
        yield from self.judge(folder, self.hf_overrides or {}, observed, Judge.set_ups)[1]


def _answers(ask: Callable[[CheckPrompt], Answer], prompts: Sequence[CheckPrompt], at_once: int) -> list[Answer] | str:
    """The answers that the server shows; the reason if it shows none."""
    reasons = ["the model has no chat template"]

    def shown(prompt: CheckPrompt) -> Answer | None:
        try:
            return ask(prompt)
        except NotShownError as error:
            reasons.append(str(error))
            return None

    with ThreadPoolExecutor(at_once) as pool:
        return list(filter(None, pool.map(shown, prompts))) or reasons[-1]
