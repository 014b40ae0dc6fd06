"""Texts that repeat a format's marks are read in linear time, by the token and at once: a grammar, or a prompt, lets a
client choose what the model writes, and the event loop reads it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.api.test_tool_parsers import TOOLS
from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.tools.formats import TOOL_FORMATS

_COUNT = 600  # the first third is longer than what parsers wait for before they give up


def _texts(opens: tuple[str, ...], marks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The beginnings of texts, and what is repeated behind each."""
    first = opens[0] if opens else marks[0]
    for head in ("f", first + "[f(a=", first + '{"name": "f", "arguments": {"a": '):
        for part in (*tuple(dict.fromkeys((*opens, *marks)))[:2], '{"', "[", "<"):
            yield head, part


def _num_calls(how: ChatParsing, head: str, part: str, count: int, *, at_once: bool) -> int:
    """The number of calls of functions, in Python and C, that reading takes."""
    parser, message, num_calls = how.new_parser(), ParsedMessage(), 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for piece in (head + part * count,) if at_once else (head, *[part] * count):
            message.add(parser.feed(piece))
        message.add(parser.finish("stop"))
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_marks_that_repeat(name: str) -> None:
    """Oracle: three times the text takes at most about three times the calls of functions."""
    form = TOOL_FORMATS[name]
    how = ChatParsing(tools=TOOLS, tool_format=form, message=form.message)
    for number, (head, part) in enumerate(_texts(form.opens, form.marks)):
        at_once = number % 2 == 0
        once = _num_calls(how, head, part, _COUNT // 3, at_once=at_once)
        assert _num_calls(how, head, part, _COUNT, at_once=at_once) < 4.5 * once + 60 * _COUNT, (head, part)


@pytest.mark.parametrize("head", ['{"name": "add", "arguments": ', '{"arguments": ', "text "])
def test_a_long_text_at_once(head: str) -> None:
    """Oracle: processor time: four times as many pieces, which are joined once, take about four times as long."""
    how = ChatParsing(tools=TOOLS, tool_format=TOOL_FORMATS["hermes"])
    times = []
    for count in (50_000, 200_000):
        text = f'<tool_call>{head}{"[" * count}{"]" * count}, "name": "add"}}</tool_call>'
        began_s = time.process_time()
        parsed = how.parse(text, (), "stop")
        times.append(time.process_time() - began_s)
        assert len(parsed.content) + sum(len(arguments) for *_, arguments in parsed.calls) >= 2 * count
    assert times[1] < 8 * times[0]
