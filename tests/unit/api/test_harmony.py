"""Messages in OpenAI's harmony format: the parts found in texts, and the shape of forced answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engine import MODEL_INFO
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_tool_parsers import ARGUMENTS, TOOLS, find
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.body import chat_parsing, chat_prompt, parsed_params
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.tools.harmony import HARMONY, HarmonyParser
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary, make_vocabulary
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2. 😀\n<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"

# text -> reasoning, content, calls
CASES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "": ("", "", []),
    " plain text, <b> and to=me \n": ("", " plain text, <b> and to=me \n", []),
    "to=me, a text": ("", "to=me, a text", []),
    f"{THOUGHT}{FINAL}It is 4.<|return|>": ("Hm, 1 < 2. 😀\n", "It is 4.", []),
    f"{FINAL} It is {{4}} <|x|>": ("", " It is {4} <|x|>", []),
    f"{THOUGHT}{CALL}{ARGUMENTS}<|call|>": ("Hm, 1 < 2. 😀\n", "", [("add", ARGUMENTS)]),
    f"{THOUGHT} to=functions.größe<|channel|>commentary json<|message|>{{}}<|call|>": (
        "Hm, 1 < 2. 😀\n",
        "",
        [("größe", "{}")],
    ),
    " to=functions.add<|channel|>commentary<|message|>{}": ("", "", [("add", "{}")]),
    f"{THOUGHT}<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{CALL}{{}}<|call|><|start|>assistant"
    f"{CALL}<|call|>": ("Hm, 1 < 2. 😀\n", "I add.", [("add", "{}"), ("add", "{}")]),
    "<|start|>assistant<|channel|>analysis to=add<|message|>{}<|call|>": ("", "", [("add", "{}")]),
    f"{THOUGHT}<|channel|>analysis to=python code<|message|>1 + 1<|call|>": ("Hm, 1 < 2. 😀\n\n\n1 + 1", "", []),
    f"{THOUGHT}{THOUGHT}{FINAL}a<|end|><|start|>assistant{FINAL}b<|return|>": (
        "Hm, 1 < 2. 😀\n\n\nHm, 1 < 2. 😀\n",
        "a\n\nb",
        [],
    ),
    # Marks are missing, or there are too many.
    "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.<|end|><|return|> \n": ("Hm.", "Yes.", []),
    "<|message|>Yes.": ("", "Yes.", []),
    "<|channel|>final": ("", "", []),
    "<|channel|>commentary to=assistant<|channel|>final<|message|>Hello": ("", "Hello", []),
    "<|channel|>final to=user<|message|>Hello<|return|>": ("", "Hello", []),
    " to=user<|channel|>final<|message|>Hello": ("", "Hello", []),
    "<|channel|>commentary to=user<|message|>Hello<|end|>": ("Hello", "", []),
    f"{FINAL}a <|en": ("", "a <|en", []),
    f"<|start|>{'x' * 1025}": ("", f"<|start|>{'x' * 1025}", []),
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_every_split(text: str, expected: Any) -> None:
    """Whole, in two pieces, in threes and by character. Oracle: the three parts by hand."""
    whole = find(HarmonyParser(TOOLS), [text])
    assert (whole.reasoning, whole.content, whole.calls) == expected
    assert find(HarmonyParser(TOOLS), text) == whole
    for first in range(len(text) + 1):
        assert find(HarmonyParser(TOOLS), [text[:first], text[first:]]) == whole, text[:first]
        assert find(HarmonyParser(TOOLS), [text[:first], text[first : first + 3], text[first + 3 :]]) == whole


@given(st.lists(st.sampled_from([*CASES, *HARMONY.marks, "a", " to=", "assistant", "\n"]), max_size=6), st.data())
def test_any_split_of_any_text(parts: Sequence[str], data: st.DataObject) -> None:
    """Oracle: the text in one piece."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut_off in (False, True):
        whole = find(HarmonyParser(TOOLS), [text], cut_off)
        assert find(HarmonyParser(TOOLS), pieces, cut_off) == whole


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_cut_off_by_a_limit(text: str, expected: Any) -> None:
    """Oracle: beginnings of the three parts, and never half a mark."""
    reasoning, content, calls = expected
    for end in range(len(text)) if len(text) < 500 else ():
        found = find(HarmonyParser(TOOLS), [text[:end]], cut_off=True)
        assert reasoning.startswith(found.reasoning) and content.startswith(found.content)
        assert [name for name, _ in found.calls] == [name for name, _ in calls[: len(found.calls)]]


def test_calls_that_nobody_wants_are_reasoning() -> None:
    """Oracle: by hand; content is the text that the model addresses to the user."""
    found = find(HarmonyParser(None), [f"{CALL}{{}}<|call|><|start|>assistant{FINAL}Yes."])
    assert (found.reasoning, found.content, found.calls) == ("{}", "Yes.", [])


def test_a_message_that_the_prompt_has_begun() -> None:
    """Oracle: by hand."""
    for prompt, parts in (
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ("", "4.")),
        (f"...<|start|>assistant{FINAL}It is ", ("", "4.")),
        ("...<|start|>assistant<|channel|>analysis<|message|>Hm", ("4.", "")),
        ("<|im_start|>assistant\n", ("", "4.")),
    ):
        found = find(HarmonyParser(None, prompt), ["4."])
        assert (found.reasoning, found.content) == parts, prompt


def test_reasoning_and_answer_are_told_apart_early() -> None:
    """Oracle: by hand; reasoning tokens are counted up to the end of the first message."""
    parser = HarmonyParser(None)
    parser.feed("<|channel|>analysis<|message|>Hm.")
    assert parser.has_reasoning and not parser.in_answer
    parser.feed("<|end|>")
    assert parser.has_reasoning and parser.in_answer
    parser = HarmonyParser(None)
    parser.feed(f"{FINAL}Y")
    assert parser.in_answer and not parser.has_reasoning


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FREE = StructuredOutputsParams(json_object=True)
FORCED = ToolRequest(
    tools=tuple({"function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "größe")), choice="required"
)


def test_forms_of_forced_answers_in_bytes() -> None:
    """Oracle: by hand; a tokenizer without the marks writes them as text."""

    def follows(constraint: StructuredOutputsParams, text: str) -> bool:
        matcher = compile_grammar(constraint, byte_vocabulary()).start()
        return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))

    writing = TokenWriting.of(None)
    one, spaceless = replace(FORCED, choice="named", name="add"), replace(FREE, disable_any_whitespace=True)
    required, named, off, tight = (
        StructuredOutputsParams(grammar=HARMONY.forced_calls(tools, writing, thinks, like))
        for tools, thinks, like in ((FORCED, True, FREE), (one, True, FREE), (one, False, FREE), (one, True, spaceless))
    )
    content = StructuredOutputsParams(json_object=True, preamble=HARMONY.preamble(writing, True, False))
    either = StructuredOutputsParams(json_object=True, preamble=HARMONY.preamble(writing, True, True))
    assert follows(either, f"{THOUGHT}{CALL}{{}}") and follows(either, f"{CALL}{{}}")
    assert not follows(content, f"{THOUGHT}{CALL}{{}}") and not follows(either, "{}")
    other = CALL.replace("add", "größe")
    for constraint in (required, named):
        assert follows(constraint, f'{CALL}{{"a": 1}}') and follows(constraint, f'{THOUGHT}{CALL}{{"a": 1}}')
        assert not follows(constraint, f"{CALL}{{}}") and not follows(constraint, '{"a": 1}')
        assert follows(constraint, f'{other}{{"a": 1}}') is (constraint is required)
    assert follows(off, f'{CALL}{{"a": 1}}') and not follows(off, f'{THOUGHT}{CALL}{{"a": 1}}')
    assert follows(tight, f'{CALL}{{"a":1}}') and not follows(tight, f'{CALL}{{"a": 1}}')
    unthinking = StructuredOutputsParams(json_object=True, preamble=HARMONY.preamble(writing, False, False))
    assert follows(unthinking, f"{FINAL}{{}}") and not follows(unthinking, f"{THOUGHT}{FINAL}{{}}")
    assert follows(content, f"{THOUGHT}{FINAL}{{}}") and follows(content, f"{FINAL}{{}}")
    assert not follows(content, "{}") and not follows(content, f"{THOUGHT}{{}}")


def test_marks_that_are_special_tokens() -> None:
    """Oracle: the tokens of a whole answer, by hand; no text replaces a mark."""
    tokenizer: Any = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY.marks)})
    writing = TokenWriting.of(tokenizer)
    vocabulary = make_vocabulary(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [tokenizer.eos_token_id or 0])
    constraint = StructuredOutputsParams(grammar=HARMONY.forced_calls(FORCED, writing, True, FREE))
    matcher = compile_grammar(constraint, vocabulary).start()
    ids = tokenizer.encode(f"{THOUGHT}{CALL}{json.dumps({'a': 7})}", add_special_tokens=False)
    assert sum(id in tokenizer.all_special_ids for id in ids) == 7
    either = compile_grammar(
        StructuredOutputsParams(regex="x", preamble=HARMONY.preamble(writing, True, True)), vocabulary
    )
    either_matcher = either.start()
    assert all(matcher.accept(token_id) and either_matcher.accept(token_id) for token_id in ids)


def test_what_a_request_becomes() -> None:
    """Oracle: by hand: the text keeps its marks, and the marks that end a call and an answer are stop tokens."""
    tokenizer: Any = copy.deepcopy(byte_level_tokenizer())
    processor = InputProcessor(MODEL_INFO, tokenizer)
    options = ChatOptions(reasoning_parser="openai_gptoss", chat_template="{{ messages[0].content }}")
    processor.chat = ChatFormat(tokenizer, options)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    parsing = chat_parsing(body, chat_prompt(body, processor), processor)
    plain = parsed_params(SamplingParams(), parsing, processor)
    assert plain.skip_special_tokens and not plain.stop_token_ids
    processor.tokenizer = tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY.marks)})
    params = parsed_params(SamplingParams(stop_token_ids=[1]), parsing, processor)
    stops = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    assert not params.skip_special_tokens and list(params.stop_token_ids) == [1, *stops]
    assert not parsed_params(SamplingParams(ignore_eos=True), parsing, processor).stop_token_ids
