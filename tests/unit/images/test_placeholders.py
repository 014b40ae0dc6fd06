"""The tokens of images in prompts, per family.

Oracle: the text that transformers' processors write for an image (their classes need torchvision, so the texts are
spelled here), tokenized whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.images import image_info, image_tokenizer
from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.placeholders import HiddenMarks, Placeholders

START, IMAGE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
GRIDS = [(2, 3), (1, 1), (3, 2)]


def row(columns: int) -> str:
    return IMAGE * columns


# family -> what its template writes for an image, and what transformers writes instead.
WRITTEN: dict[str, tuple[str, Callable[[int, int], str]]] = {
    "qwen3_5": (IMAGE, lambda rows, columns: row(rows * columns)),
    "kimi_k25": (IMAGE, lambda rows, columns: row(rows * columns)),
    "gemma3": (START, lambda rows, columns: f"\n\n{START}{row(rows * columns)}{END}\n\n"),
    "gemma4": (IMAGE, lambda rows, columns: f"{START}{row(rows * columns)}{END}"),
    "mistral3": (IMAGE, lambda rows, columns: "[IMG_BREAK]".join([row(columns)] * rows) + "[IMG_END]"),
}


def placeholders(family: str) -> Placeholders:
    settings = image_info(family).images
    assert settings is not None
    return Placeholders(settings, image_tokenizer())


def ids(text: str) -> list[int]:
    found: list[int] = image_tokenizer().encode(text, add_special_tokens=False)
    return found


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("around", ["{0}", "the {0}\n\n", "{0}{1}{2}", "\n{0}\n\n\nquick {1} {2}again"])
def test_tokens_are_those_of_the_whole_text(family: str, around: str) -> None:
    """Oracle: the text with every image written out, tokenized at once; line ends around an image may merge."""
    mark, write = WRITTEN[family]
    marks, grids = placeholders(family), GRIDS[: around.count("{")]
    assert marks.marker == mark
    expected = ids(around.format(*(write(*grid) for grid in grids)))
    pieces = tuple(around.format(*[mark] * len(grids)).split(mark))
    found, starts = marks.expand(ids(marks.text(pieces)), pieces, grids)
    assert found == expected
    image = ids(IMAGE)[0]
    for start, grid in zip(starts, grids, strict=True):
        tokens = found[start : start + marks.num_tokens(grid)]
        assert tokens == marks.tokens(grid) and tokens[0] == image and tokens.count(image) == grid[0] * grid[1]


@pytest.mark.parametrize("family", WRITTEN)
def test_prompts_of_token_ids_are_expanded_once(family: str) -> None:
    """Oracle: the tokens of the text; ids that are expanded already stay as they are."""
    marks = placeholders(family)
    pieces = ("the ", " quick ", "")
    text_ids, starts = marks.expand(ids(marks.text(pieces)), pieces, GRIDS[:2])
    assert marks.expand_ids(text_ids, GRIDS[:2]) == (text_ids, starts)
    unexpanded = [token for piece in ("the ", marks.marker, " quick ", marks.marker) for token in ids(piece)]
    expanded, starts = marks.expand_ids(unexpanded, GRIDS[:2])
    assert marks.expand_ids(expanded, GRIDS[:2]) == (expanded, starts)
    with pytest.raises(RequestError, match=r"2 marks of images .* for 3 images"):
        marks.expand_ids(unexpanded, GRIDS)


@pytest.mark.parametrize("family", WRITTEN)
def test_a_mark_in_a_users_text_is_no_image(family: str) -> None:
    """Oracle: the place of the one image; the user's own marks before and behind it stay single tokens."""
    marks = placeholders(family)
    hidden = HiddenMarks(marks.marker)
    messages = hidden.hide([{"content": f"see {marks.marker}{IMAGE}", "n": (1, marks.marker)}])
    assert marks.marker not in str(messages)
    rendered = f"{messages[0]['content']} and {marks.marker} then {messages[0]['content']}"
    pieces = hidden.pieces(rendered)
    assert pieces == (f"see {marks.marker}{IMAGE} and ", f" then see {marks.marker}{IMAGE}")
    found, starts = marks.expand(ids(marks.text(pieces)), pieces, [(2, 2)])
    before = ids(pieces[0])
    assert found[: len(before)] == before and len(starts) == 1 and starts[0] >= len(before)
    assert found[starts[0] : starts[0] + marks.num_tokens((2, 2))] == marks.tokens((2, 2))


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    """Oracle: the message names the token and the remedy."""
    settings = image_info().images
    assert settings is not None
    with pytest.raises(ConfigError, match=r"image_token_id is 1000000 .*--limit-mm-per-prompt"):
        Placeholders(dataclasses.replace(settings, image_token_id=10**6), image_tokenizer())
