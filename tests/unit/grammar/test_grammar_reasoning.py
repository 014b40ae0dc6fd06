"""An output with a grammar may begin with reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import check_grammar, compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"json": SCHEMA}, '{"a": 12}'),
    ({"json_object": True}, "{}"),
    ({"regex": "[0-9]{2}"}, "42"),
    ({"choice": ["yes", "no"]}, "yes"),
    ({"grammar": 'start: "a" b\nb: "c"'}, "ac"),
    ({"grammar": 'root ::= "x" | "y"'}, "y"),
]


def follows(text: str, reasoning: str | None, kind: dict[str, Any]) -> bool:
    """Whether ``text`` is a whole output."""
    matcher = compile_grammar(StructuredOutputsParams(**kind, reasoning=reasoning), byte_vocabulary()).start()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))


@pytest.mark.parametrize(("kind", "answer"), KINDS)
def test_thought_comes_first(kind: dict[str, Any], answer: str) -> None:
    """Oracle: by hand: reasoning that may precede the answer, that must precede it, and that must not."""
    for thought in ("", 'hm 😀 {"a": 1} </thin </think >', "\n\nlong\n"):
        closed = f"{thought}</think>"
        assert follows(f"{closed}\n\n{answer}", "open", kind) and follows(closed + answer, "open", kind)
        assert follows(f"<think>{closed}\n\n{answer}", "optional", kind)
        assert not follows(f"{closed}{closed}{answer}", "open", kind)
        assert not follows(f"{closed}no such answer", "open", kind)
        assert not follows(closed, "open", kind)
        assert not follows(f"{closed}{answer}", "optional", kind)
        assert not follows(f"{closed}{answer}", None, kind)
    assert follows(answer, "optional", kind) and follows(answer, None, kind)
    assert not follows(answer, "open", kind)


def test_other_words_are_refused() -> None:
    """Oracle: the error's words."""
    with pytest.raises(RequestError, match="open or optional"):
        StructuredOutputsParams(json_object=True, reasoning="yes")
    with pytest.raises(RequestError, match="only one of them"):
        StructuredOutputsParams(json_object=True, reasoning="open", preamble="start: @answer")
    with pytest.raises(RequestError, match="can not be used"):
        check_grammar(StructuredOutputsParams(json_object=True, preamble="start: nothing @answer"))
