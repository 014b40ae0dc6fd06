"""What a model's files say besides weights: tokens, chat template, ends of sequences, answers by schema, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.parser import ChatParsing
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.check.prompts import (
    CHATS,
    NO_TOOLS,
    TEXTS,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    chat_ids,
    differing_prompt,
    follows_weather_schema,
    tool_chat_ids,
)
from tp_engine.check.report import CheckFinding
from tp_engine.errors import RequestError
from tp_engine.sampling_params import SamplingParams
from tp_engine.structured_outputs import StructuredOutputsParams

_PUSH = 100.0  # a bias that no other token survives
_JSON_TOKENS = 96
_PROMPT_REMEDY = (
    "compare tokenizer.json, tokenizer_config.json and chat_template.jinja with the original; a server's "
    "--chat-template and --tokenizer take other files"
)
_ARGUMENTS = {"city": "Oslo"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": _ARGUMENTS}}
    ],
}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "sunny"}


def check_behaviour(llm: LLM, tokenizer: Any | None, folder: Path) -> list[CheckFinding]:
    """Return the findings; ``tokenizer`` is transformers', ``folder`` that of the oracle."""
    found = [_check_eos(llm, folder)]
    if tokenizer is None:
        return [CheckFinding.skipped("tokens", "the model has no tokenizer"), *found]
    found = [_check_tokens(llm, tokenizer), *found, _check_json(llm)]
    own = getattr(llm.get_tokenizer(), "chat_template", None)
    if (llm.input_processor.chat.options.template_text or own) is None:
        return [*found, CheckFinding.skipped("chat template", "the model has no chat template")]
    return [*found, _check_template(llm, tokenizer), *_check_tools(llm, tokenizer)]


def _given_template(llm: LLM) -> dict[str, Any]:
    """The template that the operator gives, for transformers."""
    text = llm.input_processor.chat.options.template_text
    return {} if text is None else {"chat_template": text}


def _check_tokens(llm: LLM, tokenizer: Any) -> CheckFinding:
    for name, text in TEXTS.items():
        expected = tokenizer(text)["input_ids"]
        found = llm.input_processor.text_token_ids(text, add_special_tokens=True)
        if found != expected:
            return differing_prompt("tokens", f"text {name!r}", found, expected, tokenizer, _PROMPT_REMEDY)
    return CheckFinding.right("tokens", f"{len(TEXTS)} texts have the tokens of transformers' tokenizer")


def _check_template(llm: LLM, tokenizer: Any) -> CheckFinding:
    compared = 0
    for name, messages in CHATS.items():
        expected = chat_ids(tokenizer, messages, **_given_template(llm))
        try:
            found: list[int] | None = llm.input_processor.chat_token_ids(messages)
        except RequestError:
            found = None
        compared += found is not None
        if found != expected:
            return differing_prompt("chat template", name, found or [], expected or [], tokenizer, _PROMPT_REMEDY)
    return CheckFinding.right("chat template", f"{compared} chats have the tokens of transformers' apply_chat_template")


def eos_ids(folder: Path) -> set[int]:
    """Return the ids that end a sequence, by the files that transformers reads them from."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        value = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        if value is not None:
            found |= set(value) if isinstance(value, list) else {int(value)}
            break
    return found


def _check_eos(llm: LLM, folder: Path) -> CheckFinding:
    expected, known = eos_ids(folder), set(llm.engine.model_info.eos_token_ids)
    name = "end of sequence"
    missing = sorted(expected - known)
    meaning = "answers do not end where the model ends them: they run on until max_tokens"
    remedy = "compare eos_token_id of generation_config.json and config.json with the original"
    if missing:
        return CheckFinding.wrong(
            name,
            f"tokens {missing} end a sequence by the model's files, and the engine knows {sorted(known)}",
            place="eos_token_id",
            meaning=meaning,
            remedy=remedy,
        )
    for token in sorted(known):
        params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={token: _PUSH}, detokenize=False)
        sample = llm.generate([[0, 1, 2]], params, use_tqdm=False)[0].outputs[0]
        if sample.finish_reason != "stop":
            return CheckFinding.wrong(
                name,
                f"the model chose token {token}, and the answer went on ({sample.finish_reason})",
                place=f"token {token}",
                meaning=meaning,
                remedy=remedy,
            )
    if not known:
        return CheckFinding.skipped(name, "the model names no token that ends a sequence")
    return CheckFinding.right(name, f"an answer ends at each of the tokens {sorted(known)}")


def _check_json(llm: LLM) -> CheckFinding:
    params = SamplingParams(
        temperature=0.0, max_tokens=_JSON_TOKENS, structured_outputs=StructuredOutputsParams(json=WEATHER_SCHEMA)
    )
    name = "JSON by schema"
    try:
        text = llm.generate([TEXTS["english"]], params, use_tqdm=False)[0].outputs[0].text
    except RequestError as error:
        return CheckFinding.not_checked(name, str(error))
    if follows_weather_schema(text):
        return CheckFinding.right(name, f"the answer {text} follows its schema")
    return CheckFinding.wrong(
        name,
        f"the answer {text!r} does not follow its schema",
        meaning="structured outputs and forced tool calls are not what clients ask for",
        remedy="a tokenizer.json that belongs to the model; without one the grammar has the wrong vocabulary",
    )


def _check_tools(llm: LLM, tokenizer: Any) -> Iterator[CheckFinding]:
    """The template shows tools, a call and its result as transformers does; the parser reads the call back."""
    name, chat = "tool round trip", llm.input_processor.chat
    expected = tool_chat_ids(tokenizer, [*WEATHER_QUESTION, _CALL, _RESULT], **_given_template(llm))
    if expected is None:
        yield CheckFinding.skipped(name, NO_TOOLS)
        return
    as_sent = [*WEATHER_QUESTION, _with_text(_CALL), _RESULT]  # clients send arguments as JSON text
    try:
        found = llm.input_processor.chat_token_ids(as_sent, tools=[WEATHER_TOOL])
    except RequestError:
        found = []
    if found != expected:
        yield differing_prompt(name, "a call and its result", found, expected, tokenizer, _PROMPT_REMEDY)
        return
    if chat.tool_format is None:
        yield CheckFinding.skipped(
            name, "prompts are right; the format of the model's calls is not known (--tool-call-parser)"
        )
        return
    yield _parsed(llm, name)


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    [one] = call["tool_calls"]
    function = {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}
    return {**call, "tool_calls": [{**one, "function": function}]}


def _parsed(llm: LLM, name: str) -> CheckFinding:
    chat = llm.input_processor.chat
    options = {"tools": [WEATHER_TOOL]}
    before = chat.render(WEATHER_QUESTION, options).text
    whole = chat.render([*WEATHER_QUESTION, _with_text(_CALL)], {**options, "add_generation_prompt": False}).text
    if not whole.startswith(before):
        return CheckFinding.skipped(
            name, "prompts are right; the template changes earlier messages, so the call can not be cut out"
        )
    parsing = ChatParsing(
        tools=ToolRequest(tools=(WEATHER_TOOL,), choice="auto"),
        tool_format=chat.tool_format,
        message=None if chat.tool_format is None else chat.tool_format.message,
        prompt=before,
    )
    text = whole.removeprefix(before)
    message = parsing.parse(text, (), "stop")
    calls = [(one[1], _loaded(one[2])) for one in message.calls]
    if calls == [("get_weather", _ARGUMENTS)]:
        return CheckFinding.right(name, "the template and the parser agree on a call, and its result is shown")
    return CheckFinding.wrong(
        name,
        f"the template writes a call as {text!r}, and the parser finds {calls}",
        place="tool-call parser",
        meaning="calls of the model reach clients as text",
        remedy="--tool-call-parser with the format of the model",
    )


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
