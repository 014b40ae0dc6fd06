"""An output with a grammar may begin with reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"json": SCHEMA}, '{"a": 12}'),
    ({"json_object": True}, "{}"),
    ({"regex": "[0-9]{2}"}, "42"),
    ({"choice": ["yes", "no"]}, "yes"),
    ({"grammar": 'start: "a" b\nb: "c"'}, "ac"),
    ({"grammar": 'root ::= "x" | "y"'}, "y"),
]


OPEN = "start: thought space @answer"
OPTIONAL = 'start: ("<think>" thought space)? @answer'
THOUGHT = '\nthought[suffix="</think>"]: /(?s:.*)/'


def follows(text: str, start: str | None, kind: dict[str, Any]) -> bool:
    """Whether ``text`` is a whole output."""
    preamble = None if start is None else start + THOUGHT
    matcher = compile_grammar(StructuredOutputsParams(**kind, preamble=preamble), byte_vocabulary()).start()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))


@pytest.mark.parametrize(("kind", "answer"), KINDS)
def test_thought_comes_first(kind: dict[str, Any], answer: str) -> None:
    """Oracle: by hand: reasoning that may precede the answer, that must precede it, and that must not."""
    for thought in ("", 'hm 😀 {"a": 1} </thin </think >', "\n\nlong\n"):
        closed = f"{thought}</think>"
        assert follows(f"{closed}\n\n{answer}", OPEN, kind) and follows(closed + answer, OPEN, kind)
        assert follows(f"<think>{closed}\n\n{answer}", OPTIONAL, kind)
        assert not follows(f"{closed}{closed}{answer}", OPEN, kind)
        assert not follows(f"{closed}no such answer", OPEN, kind)
        assert not follows(closed, OPEN, kind)
        assert not follows(f"{closed}{answer}", OPTIONAL, kind)
        assert not follows(f"{closed}{answer}", None, kind)
    assert follows(answer, OPTIONAL, kind) and follows(answer, None, kind)
    assert not follows(answer, OPEN, kind)


def test_white_space_is_bounded() -> None:
    """Oracle: at most 8 characters, none if the request wants none, for any kind of answer."""
    for kind, answer in KINDS:
        for tight in (False, True):
            texts = [f"</think>{' ' * number}{answer.replace(' ', '')}" for number in (0, 8, 9)]
            found = [follows(text, OPEN, kind | {"disable_any_whitespace": tight}) for text in texts]
            assert found == [True, not tight, False]


def test_other_preambles_are_refused() -> None:
    """Oracle: the error's words."""
    with pytest.raises(RequestError, match="cannot be used"):
        compile_grammar(StructuredOutputsParams(json_object=True, preamble="start: nothing @answer"), byte_vocabulary())
