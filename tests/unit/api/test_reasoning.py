"""Reasoning and answer, separated in text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningTokens
from tp_engine.api.openai.structured import TokenWriting
from tp_engine.grammar.compiler import check_grammar, compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.structured_outputs import StructuredOutputsParams


def divide(text: Iterable[str], *, inside: bool, cut_off: bool = False) -> tuple[str, str, bool]:
    parser = REASONING_FORMATS["qwen3"].new_parser(inside=inside)
    parts = [parser.feed(piece) for piece in text]
    has_reasoning = parser.has_reasoning
    parts.append(parser.finish(cut_off=cut_off))
    return "".join(one for one, _ in parts), "".join(other for _, other in parts), has_reasoning


CASES = [
    # text, whether the prompt opened the mark, reasoning, answer
    ("<think>\nLet me see. 😀\n\nYes.\n</think>\n\nIt is 4. ", False, "Let me see. 😀\n\nYes.", "It is 4. "),
    ("\nLet me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
    ("<think>\nrepeated</think>four", True, "repeated", "four"),
    ("<think>\n\n</think>\n\nfour", False, "", "four"),
    (" No thought, but <think> is a word </think>.", False, "", " No thought, but <think> is a word </think>."),
    ("a < b </thin </think >", True, "a < b </thin </think >", ""),
    ("thought</think>one</think>two", True, "thought", "one</think>two"),
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

    parser = marks.new_parser(inside=inside)
    parts = [parser.feed(char) for char in renamed(text)] + [parser.finish(cut_off=False)]
    expected = (renamed(reasoning), renamed(answer))
    assert ("".join(one for one, _ in parts), "".join(other for _, other in parts)) == expected
    assert marks.begins_inside("says [THINK]") and not marks.begins_inside("says <think>")


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
        parser = form.new_parser(inside=form.begins_inside("<|assistant|>"))
        parts = [parser.feed(piece) for piece in split] + [parser.finish(cut_off=False)]
        assert ("".join(one for one, _ in parts), "".join(other for _, other in parts)) == (reasoning, answer)
        cut = form.new_parser(inside=form.begins_inside("<|assistant|>"))
        shown = [cut.feed(piece) for piece in list(split)[:1]] + [cut.finish(cut_off=True)]
        assert answer.startswith("".join(other for _, other in shown))


def test_marks_come_first_in_a_grammar() -> None:
    """Oracle: whole outputs by hand; marks that are special tokens are tokens, other marks are text."""
    for name, open_mark, close in (
        ("mistral", "[THINK]", "[/THINK]"),
        ("granite", "Here's my thought process:", "Here is my response:"),
        ("granite", "<think>", "</think>"),
    ):
        for inside in (False, True):
            preamble = REASONING_FORMATS[name].preamble(TokenWriting(None), inside=inside)
            constraint = StructuredOutputsParams(choice=["yes"], preamble=preamble)
            check_grammar(constraint)
            first = "" if inside else open_mark
            for text, fits in ((f"{first}Hm.{close} yes", True), ("yes", not inside), (f"{first}Hm.{close}no", False)):
                matcher = compile_grammar(constraint, byte_vocabulary()).start()
                is_whole = all(matcher.accept(byte) for byte in text.encode())
                assert (is_whole and (matcher.is_over or matcher.accept(256))) is fits, (name, text)
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    preamble = REASONING_FORMATS["mistral"].preamble(TokenWriting(tokenizer), inside=False)
    ids = tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]"])
    assert [f"<[{token_id}]>" in preamble for token_id in ids] == [True, True] and "THINK" not in preamble


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "disabled", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", None, False, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, False, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, True, False),
        ("deepseek_r1", "<|Assistant|>", None, False, True),
        ("deepseek_r1", "<|Assistant|><think>\n", None, False, True),
        ("deepseek_r1", "what is <think>?<|Assistant|>", None, False, True),
        ("deepseek_r1", "<|Assistant|></think>", None, False, False),
        ("deepseek_r1", "<|Assistant|>", None, True, False),
        ("qwen3", "what is <think>", "<think>\nHm, ", False, True),
        ("deepseek_r1", "...", "<think>\nHm</think>It", False, False),
        ("deepseek_r1", "...", "It", False, False),
    ],
)
def test_what_the_prompt_says(parser: str, prompt: str, continued: str | None, disabled: bool, expected: bool) -> None:
    """Oracle: the ends of prompts of Qwen3, Qwen3 Thinking, DeepSeek R1 and V3.1, and messages to continue."""
    assert REASONING_FORMATS[parser].begins_inside(prompt, continued=continued, thinking_disabled=disabled) is expected


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
