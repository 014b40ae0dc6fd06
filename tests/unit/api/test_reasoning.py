"""Reasoning and answer, separated in text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_tool_parsers import find
from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.reasoning import (
    REASONING_FORMATS,
    Beginning,
    ReasoningFormat,
    ReasoningParser,
    ReasoningTokens,
)
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams


def begins(inside: bool) -> Beginning:
    return Beginning.REASONING if inside else Beginning.EITHER


def divided(parser: ReasoningParser, text: Iterable[str], cut_off: bool = False) -> tuple[str, str]:
    found = find(parser, text, cut_off)
    return found.reasoning, found.content


def divide(text: Iterable[str], *, inside: bool, cut_off: bool = False) -> tuple[str, str, bool]:
    parser = ReasoningParser(REASONING_FORMATS["qwen3"], begins(inside))
    return *divided(parser, text, cut_off), parser.has_reasoning


CASES = [
    # text, whether the prompt opened the mark, reasoning, answer
    ("<think>\nLet me see. 😀\n\nYes.\n</think>\n\nIt is 4. ", False, "Let me see. 😀\n\nYes.", "It is 4. "),
    ("\nLet me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
    ("<think>\nrepeated</think>four", True, "repeated", "four"),
    ("<think>\n\n</think>\n\nfour", False, "", "four"),
    (" No thought, but <think> is a word </think>.", False, "", " No thought, but <think> is a word </think>."),
    ("a < b </thin </think >", True, "a < b </thin </think >", ""),
    ("thought</think>one</think>two", True, "thought", "one</think>two"),
    ("thought</think> </think>\none", True, "thought", "one"),
    ("</think>\none</think>two", False, "", "one</think>two"),
    ("all of it \n", True, "all of it", ""),
    ("<thin", False, "", "<thin"),
    ("", True, "", ""),
    ("", False, "", ""),
    (" \n", False, "", " \n"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), CASES)
def test_every_split(text: str, inside: bool, reasoning: str, answer: str) -> None:
    """One, two and three pieces, and single characters. Oracle: both parts written out by hand."""
    whole = divide([text], inside=inside)
    assert whole[:2] == (reasoning, answer)
    assert divide(text, inside=inside) == whole
    for first in range(len(text) + 1):
        assert divide([text[:first], text[first:]], inside=inside) == whole
        for second in range(first, len(text) + 1, 3):
            assert divide([text[:first], text[first:second], text[second:]], inside=inside) == whole


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), CASES)
def test_cut_off_by_a_limit(text: str, inside: bool, reasoning: str, answer: str) -> None:
    """Oracle: beginnings of both parts, and never half a mark at the end of the reasoning."""
    for end in range(len(text)):
        thought, said, _ = divide(text[:end], inside=inside, cut_off=True)
        assert reasoning.startswith(thought) and answer.startswith(said)
        assert not (text[:end].endswith("</think") and thought.endswith("</think"))


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), CASES)
def test_a_format_with_other_marks(text: str, inside: bool, reasoning: str, answer: str) -> None:
    """Oracle: the cases above with their marks replaced; single characters, and the prompt's end."""
    marks = ReasoningFormat(help="", opens=("[THINK]",), closes=("[/THINK]",))

    def renamed(words: str) -> str:
        return words.replace("</think", "[/THINK").replace("<think", "[THINK").replace("THINK>", "THINK]")

    parser = ReasoningParser(marks, begins(inside))
    assert divided(parser, renamed(text)) == (renamed(reasoning), renamed(answer))
    assert marks.beginning("says [THINK]") is Beginning.REASONING
    assert marks.beginning("says <think>") is Beginning.EITHER


FORMATS = [
    # the parser, text, reasoning, answer
    ("glm45", "\n<think>Hm.</think>\nFour.", "Hm.", "Four."),
    ("glm45", "Four.", "", "Four."),
    ("minimax_m2", "Hm.\n</think>\n\nFour.", "Hm.", "Four."),
    ("mistral", "[THINK]Hm.[/THINK]Four. [THINK]", "Hm.", "Four. [THINK]"),
    ("mistral", "Four.", "", "Four."),
    ("granite", "Here is my thought process: Hm.\n\nHere is my response: Four.", "Hm.", "Four."),
    ("granite", "Here's my thought process:\nHere is it. Here's my response:\nFour.", "Here is it.", "Four."),
    ("granite", "<think>Hm.</think> <response>Four.</response>", "Hm.", "Four."),
    ("granite", "Here is my answer: Four.", "", "Here is my answer: Four."),
    ("gemma4", "<|channel>thought\nHm.<channel|>Four.", "Hm.", "Four."),
    ("gemma4", "<|channel>thousand<channel|>Four.", "thousand", "Four."),
    ("gemma4", "thought\nHm.<channel|>Four.", "Hm.", "Four."),
    ("gemma4", "thoughtful: four.", "", "thoughtful: four."),
    ("gemma4", "<|channel><|channel>thought\nHm.<channel|>Four.", "Hm.", "Four."),
    ("ernie45", "Hm.\n</think>\n\n\n<response>\nFour. \n</response>\n", "Hm.", "Four."),
    ("ernie45", "<think>\nHm.</think>\nFour.", "Hm.", "Four."),
    ("ernie45", "Hm.</think><response>\nFour.</resp", "Hm.", "Four.</resp"),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "answer"), FORMATS)
def test_every_split_in_other_formats(name: str, text: str, reasoning: str, answer: str) -> None:
    """In the models' own formats, whole, in two pieces and by character. Oracle: both parts by hand."""
    form = REASONING_FORMATS[name]
    pieces: list[Iterable[str]] = [[text[:first], text[first:]] for first in range(len(text) + 1)]
    for split in (*pieces, text):
        begins = form.beginning("<|assistant|>")
        assert divided(ReasoningParser(form, begins), split) == (reasoning, answer)
        assert answer.startswith(divided(ReasoningParser(form, begins), list(split)[:1], cut_off=True)[1])


LATE = ["<channel|>", "<|channel>thought\n<channel|>", "<|channel>thought\n<channel|><channel|>"]


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("has_tools", [False, True])
def test_gemma4_repeats_marks_behind_its_reasoning(late: str, has_tools: bool) -> None:
    """With and without tools, for every split in two. Oracle: by hand; an answer by a grammar keeps its text."""
    tools = ToolRequest(tools=({"function": {"name": "add", "parameters": {}}},), choice="auto")
    how = ChatParsing(
        tools=tools if has_tools else None,
        tool_format=TOOL_FORMATS["gemma4"],
        reasoning=REASONING_FORMATS["gemma4"],
        begins=Beginning.EITHER,
    )
    text = f"<|channel>thought\nHm.<channel|>Two{late} and\ntwo.{late}"
    for first in range(len(text) + 1):
        parser, found = how.new_parser(), ParsedMessage()
        found.add([*parser.feed(text[:first]), *parser.feed(text[first:]), *parser.finish("stop")])
        assert (found.reasoning, found.content, found.calls) == ("Hm.", "Two and\ntwo.", [])
    assert replace(how, constrained=True, tools=None).parse(text, (), "stop").content == f"Two{late} and\ntwo.{late}"
    assert how.parse("Four.<chan", (), "length").content == "Four."


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|>It is 4.", "Hm.", "It is 4."),
        ("<|think|>Hm.<|end|>It is 4.", "Hm.", "It is 4."),
        ("<|think|><|end|><|begin|>assistant<|content|>It is 4.<|end|>", "", "It is 4."),
        ("<|content|>It is 4.", "", "It is 4."),
        ("<|begin|>assistant<|content|>It is <|x|> 4.", "", "It is <|x|> 4."),
        ("It is 4.", "", "It is 4."),
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|>", "Hm.", ""),
    ],
)
@pytest.mark.parametrize("has_tools", [False, True])
def test_marks_in_front_of_an_answer(has_tools: bool, text: str, reasoning: str, content: str) -> None:
    """Solar Open's, for every split. Oracle: by hand; a grammar's answer has the marks in front of it too."""
    tools = ToolRequest(tools=({"function": {"name": "f", "parameters": {"type": "object"}}},), choice="auto")
    how = ChatParsing(
        tools=tools if has_tools else None,
        tool_format=TOOL_FORMATS["solar_open"],
        reasoning=REASONING_FORMATS["solar_open"],
        begins=Beginning.EITHER,
    )
    for first in range(len(text) + 1):
        parser, found = how.new_parser(), ParsedMessage()
        found.add([*parser.feed(text[:first]), *parser.feed(text[first:]), *parser.finish("stop")])
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, []), text[:first]
    if not text.endswith("<|end|>"):
        found = replace(how, constrained=True, tools=None).parse(text, (), "stop")
        assert (found.reasoning, found.content) == (reasoning, content)


def follows(constraint: StructuredOutputsParams, text: str) -> bool:
    """Whether ``text`` is a whole output."""
    matcher = compile_grammar(constraint, byte_vocabulary()).start()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))


def test_marks_in_front_of_an_answer_in_a_grammar() -> None:
    """Oracle: whole outputs by hand: they may come, once, as the model writes them."""
    heads = ("<|begin|>assistant<|content|>", "<|begin|>assistant", "<|content|>", "")
    for begins in (Beginning.REASONING, Beginning.EITHER):
        preamble = REASONING_FORMATS["solar_open"].preamble(TokenWriting.of(None), begins)
        constraint = StructuredOutputsParams(choice=["yes"], preamble=preamble)
        opens = "<|think|>" if begins is Beginning.EITHER else ""
        for head in heads:
            assert follows(constraint, f"{opens}Hm.<|end|>{head}yes")
            assert follows(constraint, f"{head}yes") is (begins is Beginning.EITHER)
            assert not follows(constraint, f"{opens}Hm.<|end|>{head}<|begin|>yes")


@pytest.mark.parametrize("kind", [{"choice": ["yes"]}, {"regex": "yes"}, {"json": {"enum": ["yes"]}}])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(
    ("name", "open_mark", "close"),
    [
        ("qwen3", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("granite", "Here's my thought process:", "Here is my response:"),
        ("granite", "<think>", "</think>"),
        ("hy_v3", "<think:opensource>", "</think:opensource>"),
        ("hy_v3", "<think>", "</think>"),
        ("solar_open", "<|think|>", "<|end|>"),
    ],
)
def test_marks_come_first_in_a_grammar(
    name: str, open_mark: str, close: str, tight: bool, kind: dict[str, Any]
) -> None:
    """Oracle: whole outputs by hand: reasoning that must come first, that may, and that must not; white space behind
    the closing mark only, at most 8 characters, and none if the request wants none."""
    answer = '"yes"' if "json" in kind else "yes"
    for begins in Beginning:
        preamble = REASONING_FORMATS[name].preamble(TokenWriting.of(None), begins)
        constraint = StructuredOutputsParams(**kind, preamble=preamble, disable_any_whitespace=tight)
        thinks, may_answer = begins is not Beginning.ANSWER, begins is not Beginning.REASONING
        first = open_mark if begins is Beginning.EITHER else ""
        thought = f"{first}\nHm. 😀 {close[:-1]} {close}"
        for text, fits in (
            (thought + answer, thinks),
            (f"{thought}\n\n{answer}", thinks and not tight),
            (thought + " " * 8 + answer, thinks and not tight),
            (thought + " " * 9 + answer, False),
            (f"{thought}no", False),
            (thought + thought + answer, False),
            (answer, may_answer),
            (f"\n{answer}", False),
            (f" {thought}{answer}", begins is Beginning.REASONING),
        ):
            assert follows(constraint, text) is fits, (begins, text)


def test_marks_that_are_special_tokens_are_tokens() -> None:
    """Oracle: their ids in the grammar, in place of their texts."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    preamble = REASONING_FORMATS["mistral"].preamble(TokenWriting.of(tokenizer), Beginning.EITHER)
    assert preamble is not None
    ids = tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]"])
    assert [f"<[{token_id}]>" in preamble for token_id in ids] == [True, True] and "THINK" not in preamble


REASONING, EITHER, ANSWER = Beginning


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "disabled", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", None, False, EITHER),
        ("qwen3", "<|im_start|>assistant\n", None, True, ANSWER),
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, False, REASONING),
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, True, REASONING),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, True, ANSWER),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False, ANSWER),
        ("qwen3", "what is </think>?<|im_end|>\n<|im_start|>assistant\n", None, False, EITHER),
        ("deepseek_r1", "<|Assistant|>", None, False, REASONING),
        ("deepseek_r1", "<|Assistant|><think>\n", None, False, REASONING),
        ("deepseek_r1", "what is <think>?<|Assistant|>", None, False, REASONING),
        ("deepseek_r1", "<|Assistant|></think>", None, False, ANSWER),
        ("deepseek_r1", "<|Assistant|>", None, True, ANSWER),
        ("mistral", "[/INST][THINK][/THINK]", None, False, ANSWER),
        ("granite", "<think></think><response>", None, False, ANSWER),
        ("ernie45", "</think>\n\n<response>\n", None, False, ANSWER),
        ("granite", "Here is my response:", None, False, ANSWER),
        ("qwen3", "what is <think>", "<think>\nHm, ", False, REASONING),
        ("qwen3", "...", "It", False, ANSWER),
        ("qwen3", "...assistant\n", " ", False, EITHER),
        ("deepseek_r1", "...", "<think>\nHm</think>It", False, ANSWER),
        ("deepseek_r1", "...", "It", False, ANSWER),
    ],
)
def test_what_the_prompt_says(
    parser: str, prompt: str, continued: str | None, disabled: bool, expected: Beginning
) -> None:
    """Oracle: the ends of prompts of Qwen3, Qwen3 Thinking, DeepSeek R1 and V3.1, and messages to continue."""
    found = REASONING_FORMATS[parser].beginning(prompt, continued=continued, thinking_disabled=disabled)
    assert found is expected


def test_tokens_are_counted_with_and_without_a_token_for_the_mark() -> None:
    """Oracle: the tokens up to the mark's end, counted by hand; all of them without a mark."""
    assert ReasoningTokens(("</think>",), 7, lambda ids: "").count([1, 2, 7, 3, 7]) == 3
    assert ReasoningTokens(("</think>",), 7, lambda ids: "").count([1, 2]) == 2
    tokenizer = byte_level_tokenizer()
    counter = REASONING_FORMATS["qwen3"].tokens(tokenizer)
    assert counter.close_id is None
    thought = tokenizer.encode("<s>again and again</think>", add_special_tokens=False)
    assert counter.count([*thought, *tokenizer.encode("lazy dog")]) == len(thought)
    assert counter.count(thought[:-1]) == len(thought) - 1


def test_a_long_thought_is_counted_in_pieces() -> None:
    """Oracle: the tokens up to the mark, wherever it stands; decoding a whole thought again and again would hold up
    other requests."""
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return bytes(token_ids).decode()

    counter = ReasoningTokens(("</think>", "[END]"), None, decode)
    for length in (0, 500, 508, 512, 2040, 5000):
        for mark in (b"</think>", b"[END]"):
            assert counter.count([*b"x" * length, *mark, *b" and </think> more" * 100]) == length + len(mark)
    assert max(sizes) < 1000 and sum(sizes) < 100_000
