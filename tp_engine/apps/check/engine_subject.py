"""An engine that the check has started, as its subject; a tool call through its template and parser, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.parser import ChatParsing
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.apps.check.behaviour import PUSH, NotShownError
from tp_engine.apps.check.prompts import (
    NO_TOOLS,
    TEXTS,
    UNSETTLED,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    differing_prompt,
    tool_chat_ids,
)
from tp_engine.apps.check.report import CheckFinding
from tp_engine.errors import RequestError
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

_JSON_TOKENS = 96
_ARGUMENTS = {"city": "Oslo"}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "sunny"}


class EngineSubject:
    """The engine of ``llm``, which is asked for tokens and answers."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._inputs = llm, llm.input_processor

    @property
    def template(self) -> dict[str, Any] | None:
        """The operator's template, for transformers; empty if the tokenizer has one, None if there is none."""
        if (text := self._inputs.chat.options.template_text) is not None:
            return {"chat_template": text}
        return None if getattr(self._llm.get_tokenizer(), "chat_template", None) is None else {}

    def token_ids(self, text: str) -> list[int]:
        return self._inputs.text_token_ids(text, add_special_tokens=True)

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """A chat's tokens; none if the engine refuses it."""
        try:
            return self._inputs.chat_token_ids(messages, **options)
        except RequestError:
            return []

    def num_prompt_tokens(self, content: str | Sequence[Mapping[str, Any]]) -> int:
        return len(self.token_ids(content) if isinstance(content, str) else self.chat_token_ids(content))

    def end_after(self, token: int) -> str | None:
        return str(self._answer([0, 1, 2], max_tokens=8, logit_bias={token: PUSH}, detokenize=False).finish_reason)

    def shaped_answer(self) -> str:
        """An answer by ``WEATHER_SCHEMA``; ``NotShownError`` if the tokens cannot write one to its end."""
        shape = StructuredOutputsParams(json=WEATHER_SCHEMA, disable_any_whitespace=True)
        answer = self._answer(TEXTS["english"], max_tokens=_JSON_TOKENS, structured_outputs=shape)
        if answer.finish_reason in ("length", "error"):
            raise NotShownError(f"the answer ends before its grammar does ({answer.finish_reason})")
        return str(answer.text)

    def _answer(self, prompt: Any, **params: Any) -> Any:
        return self._llm.generate([prompt], SamplingParams(temperature=0.0, **params), use_tqdm=False)[0].outputs[0]

    def check_tools(self, name: str, tokenizer: Any) -> Iterator[CheckFinding]:
        """Yield whether the template shows a call and its result as transformers does, and the parser reads it back."""
        given = self.template or {}
        make = partial(tool_chat_ids, tokenizer, [*WEATHER_QUESTION, _call(_ARGUMENTS), _RESULT], **given)
        expected = make()
        if expected is None:
            yield CheckFinding.skipped(name, NO_TOOLS)
            return
        as_sent = _call(json.dumps(_ARGUMENTS))  # clients send arguments as JSON text
        found = self.chat_token_ids([*WEATHER_QUESTION, as_sent, _RESULT], tools=[WEATHER_TOOL])
        if found != expected:
            differs = differing_prompt(name, "a call and its result", found, expected, tokenizer)
            yield differs if make() == expected else CheckFinding.skipped(name, UNSETTLED)
            return
        chat, options = self._inputs.chat, {"tools": [WEATHER_TOOL]}
        if chat.tool_format is None:
            told = "prompts are right; the format of the model's calls is not known (--tool-call-parser)"
            yield CheckFinding.skipped(name, told)
            return
        before = chat.render(WEATHER_QUESTION, options).text
        whole = chat.render([*WEATHER_QUESTION, as_sent], {**options, "add_generation_prompt": False}).text
        if not whole.startswith(before):
            told = "prompts are right; the template changes earlier messages, so the call cannot be cut out"
            yield CheckFinding.skipped(name, told)
            return
        tools = ToolRequest(tools=(WEATHER_TOOL,), choice="auto")
        parsing = ChatParsing(
            tools=tools, tool_format=chat.tool_format, message=chat.tool_format.message, prompt=before
        )
        text = whole.removeprefix(before)
        calls = [(one[1], _loaded(one[2])) for one in parsing.parse(text, (), "stop").calls]
        if calls == [("get_weather", _ARGUMENTS)]:
            told = "the template and the parser agree on a call, and its result is shown"
            yield CheckFinding.right(name, told)
            return
        yield CheckFinding.wrong(
            name,
            f"the template writes a call as {text!r}, and the parser finds {calls}",
            "tool-call parser",
            "calls of the model reach clients as text",
            "--tool-call-parser with the format of the model",
        )


def _call(arguments: Any) -> dict[str, Any]:
    """An assistant's message with a call."""
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
