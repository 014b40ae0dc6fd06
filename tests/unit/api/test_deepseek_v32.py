"""Prompts of DeepSeek V3.2, whose repository has code instead of a chat template, by the rules of that code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.reasoning import REASONING_FORMATS, Beginning
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import RequestError

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
HI, OK = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm."}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": 'the "ö"', "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "parameters": {}}},
]
# By the rules: the marks of calls as the model must write them, and a line of JSON for each tool.
LISTED = """

## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<D|function_calls>" block like the following as part of your reply to the user:
<D|function_calls>
<D|invoke name="$FUNCTION_NAME">
<D|parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</D|parameter>
...
</D|invoke>
<D|invoke name="$FUNCTION_NAME2">
...
</D|invoke>
</D|function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<D|function_calls>
...
</D|function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{"name": "f", "description": "the \\"ö\\"", "parameters": {"type": "object"}}
{"name": "g", "parameters": {}}
</functions>
""".replace("D|", "｜DSML｜")


def calls(*written: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(written)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made} | fields


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


TWO = calls(("f", {"items": 'x"y', "n": 5, "o": {"k": [None, "ä"]}}), ("g", {}), content="I look.")
TWO_WRITTEN = """I look.

<D|function_calls>
<D|invoke name="f">
<D|parameter name="items" string="true">x"y</D|parameter>
<D|parameter name="n" string="false">5</D|parameter>
<D|parameter name="o" string="false">{"k": [null, "ä"]}</D|parameter>
</D|invoke>
<D|invoke name="g">

</D|invoke>
</D|function_calls>""".replace("D|", "｜DSML｜")
RESULTS = "\n\n<function_results>\n<result>1</result>\n<result>{}</result>\n</function_results>\n\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """The format of a folder as the model's: a tokenizer.json, and no template."""
    folder = tmp_path_factory.mktemp("v32")
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "config.json").write_text('{"model_type": "deepseek_v32"}')
    return ChatFormat(load_tokenizer(str(folder)))


def test_formats_are_chosen(chat: ChatFormat) -> None:
    """Oracle: those of the model."""
    assert chat.tool_format is TOOL_FORMATS["deepseek_v32"] and chat.reasoning_format is REASONING_FORMATS["qwen3"]


@pytest.mark.parametrize(
    ("messages", "tools", "plain", "thinking"),
    [
        ([HI], None, f"{BOS}{USER}Hi{ASSISTANT}</think>", f"{BOS}{USER}Hi{ASSISTANT}<think>"),
        (
            [{"role": "system", "content": "Be brief."}, HI, OK, HI],
            None,
            f"{BOS}Be brief.{USER}Hi{ASSISTANT}</think>Ok.{EOS}{USER}Hi{ASSISTANT}</think>",
            f"{BOS}Be brief.{USER}Hi{ASSISTANT}</think>Ok.{EOS}{USER}Hi{ASSISTANT}<think>",
        ),
        ([HI], TOOLS, f"{BOS}{LISTED}{USER}Hi{ASSISTANT}</think>", f"{BOS}{LISTED}{USER}Hi{ASSISTANT}<think>"),
        (
            [{"role": "system", "content": "Be brief."}, HI],
            TOOLS,
            f"{BOS}Be brief.{LISTED}{USER}Hi{ASSISTANT}</think>",
            f"{BOS}Be brief.{LISTED}{USER}Hi{ASSISTANT}<think>",
        ),
        (
            [{"role": "developer", "content": "Search."}],
            None,
            f"{BOS}{USER}\n\n# The user's message is: Search.{ASSISTANT}</think>",
            f"{BOS}{USER}\n\n# The user's message is: Search.{ASSISTANT}<think>",
        ),
        (
            [HI, TWO | {"reasoning_content": "Hm."}, result(0, "1"), result(1, "{}")],
            None,
            f"{BOS}{USER}Hi{ASSISTANT}</think>{TWO_WRITTEN}{EOS}{RESULTS}</think>",
            f"{BOS}{USER}Hi{ASSISTANT}<think>Hm.</think>{TWO_WRITTEN}{EOS}{RESULTS}<think>",
        ),
        (
            [HI, TWO, result(0, "1"), result(1, "{}"), OK, HI],
            None,
            f"{BOS}{USER}Hi{ASSISTANT}</think>{TWO_WRITTEN}{EOS}{RESULTS}</think>Ok.{EOS}{USER}Hi{ASSISTANT}</think>",
            f"{BOS}{USER}Hi{ASSISTANT}</think>{TWO_WRITTEN}{EOS}{RESULTS}</think>Ok.{EOS}{USER}Hi{ASSISTANT}<think>",
        ),
        (
            [HI, TWO, result(0, "1"), result(1, "{}"), OK],
            None,
            f"{BOS}{USER}Hi{ASSISTANT}</think>{TWO_WRITTEN}{EOS}{RESULTS}</think>Ok.{EOS}",
            f"{BOS}{USER}Hi{ASSISTANT}<think></think>{TWO_WRITTEN}{EOS}{RESULTS}<think>Hm.</think>Ok.{EOS}",
        ),
    ],
)  # fmt: skip
def test_prompts(chat: ChatFormat, messages: Any, tools: Any, plain: str, thinking: str) -> None:
    """Oracle: by hand, from the rules; thinking is off unless a request switches it on."""
    options = {} if tools is None else {"tools": tools}
    assert chat.render(messages, options).text == plain
    assert chat.render(messages, options | {"thinking": False, "enable_thinking": False}).text == plain
    for switch in ("thinking", "enable_thinking"):
        assert chat.render(messages, options | {switch: True}).text == thinking


def test_what_a_prompt_begins(chat: ChatFormat) -> None:
    """Oracle: the marks at the prompt's end; without a generation prompt it ends with the question."""
    reasoning = chat.reasoning_format
    assert reasoning is not None
    assert reasoning.beginning(chat.render([HI]).text) is Beginning.ANSWER
    assert reasoning.beginning(chat.render([HI], {"thinking": True}).text) is Beginning.REASONING
    assert chat.render([HI], {"add_generation_prompt": False}).text == f"{BOS}{USER}Hi"
    assert chat.render([HI, OK], {"continue_final_message": True}).text == f"{BOS}{USER}Hi{ASSISTANT}</think>Ok."


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([HI, {"role": "assistant", "content": "Ok."}], r"messages\[1\] .*reasoning_content.*switch thinking off"),
        ([HI, result(0, "1")], r"messages\[1\] is the result of a tool, but no call"),
        ([result(0, "1")], r"messages\[0\] is the result of a tool, but no call"),
        ([HI, {"role": "critic", "content": "No."}], r"messages\[1\] has the role critic"),
    ],
)
def test_refusals(chat: ChatFormat, messages: Any, words: str) -> None:
    """Oracle: the rule, the message and the remedy."""
    with pytest.raises(RequestError, match=words):
        chat.render(messages, {"thinking": True})


def test_a_template_of_the_operator_or_the_folder_goes_before(tmp_path: Path) -> None:
    """Oracle: the order: --chat-template, the folder's, ours."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    tokenizer = load_tokenizer(str(tmp_path))
    assert ChatFormat(tokenizer).render([HI]).text == "of the folder"
    assert ChatFormat(tokenizer, ChatOptions(chat_template="{{ 1 }}")).render([HI]).text == "1"
