"""Chunks made from a template against chunks encoded as a whole."""

from __future__ import annotations

import pytest

from tp_engine.api.openai.answer_shape import AnswerShape
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, GenerationBody, parse_body
from tp_engine.requests.outputs import CompletionOutput
from tp_engine.server.replies import event
from tp_engine.server.streaming import ChunkTemplate

TEXTS = ("a", ' "quoted" \\ and /', "\n\r\t\x00\x1f\x7f", "é 漢字 😀", "\u2028\u2029", "</script>", "data: [DONE]\n\n")
BODIES: tuple[tuple[type[GenerationBody], str], ...] = (
    (CompletionBody, '{"prompt": "x", "n": 3}'),
    (ChatBody, '{"messages": [{"role": "user", "content": "x"}], "n": 3}'),
)


@pytest.mark.parametrize(("kind", "raw"), BODIES)
@pytest.mark.parametrize("model", ["m", 'a "model" 模'])
def test_a_template_gives_the_bytes_of_the_whole_chunk(kind: type[CompletionBody], raw: str, model: str) -> None:
    """Oracle: the chunk's JSON encoded as a whole."""
    shape = AnswerShape.of(parse_body(kind, raw), model)
    for number, index in ((0, 0), (2, 1)):
        template = ChunkTemplate(shape, number, index)
        for text in TEXTS:
            part = CompletionOutput(index=index, text=text, token_ids=[7])
            whole = shape.envelope([shape.chunk_choice(number, part)], None, chunk=True)
            assert template.event(text) == event(whole)
