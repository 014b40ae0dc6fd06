"""Where a prompt has images: what chat templates write for one, and the tokens that stand in its place.

| family | a template writes | text in its place | the image's tokens |
| --- | --- | --- | --- |
| Qwen2-VL to Qwen3-VL, Qwen3.5, Kimi K2.5 | its image token | the same | one per cell |
| Gemma 3 | its start token | two line ends, start, image, end, two line ends | one per cell |
| Gemma 4 | its image token | start, image, end | one per cell |
| Mistral 3 | ``[IMG]`` | the same | rows of them, each with ``[IMG_BREAK]``, the last with ``[IMG_END]`` |

The text is tokenized with one image token per image, since those around it may merge with a user's text, and that token
becomes the image's tokens afterwards.  A token that a user's own text contains is no image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.settings import ImageSettings

Grid: TypeAlias = tuple[int, int]
Pieces: TypeAlias = tuple[str, ...]
"""A text with images: pieces of text, with an image between each two."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What one family writes: names of tokens in braces.  ``row_ends``: after each row but the last, and after it."""

    template: str = "{image}"
    text: str = "{image}"
    row_ends: tuple[str, str] | None = None


_FORMS: Mapping[str, _Form] = {
    "qwen2_5_vl": _Form(),
    "qwen3_vl": _Form(),
    "qwen3_5": _Form(),
    "kimi_k25": _Form(),
    "gemma3": _Form("{start}", "\n\n{start}{image}{end}\n\n"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _Form(text="{start}{image}{end}")),
    "mistral3": _Form(row_ends=("[IMG_BREAK]", "[IMG_END]")),
}


class Placeholders:
    """One model's; ``ConfigError`` if its tokenizer lacks a token that its images need."""

    def __init__(self, settings: ImageSettings, tokenizer: Any) -> None:
        form = _FORMS[settings.family]
        self.image_id = settings.image_token_id
        self._tokenizer = tokenizer
        names = {"image": _token(tokenizer, "image_token_id", settings.image_token_id)}
        if "{start}" in form.template + form.text:
            names["start"] = _token(tokenizer, "the token before an image", settings.start_token_id)
            names["end"] = _token(tokenizer, "the token behind an image", settings.end_token_id)
        self.marker = form.template.format(**names)
        """What a chat template writes for an image."""
        self._image = names["image"]
        self._text = form.text.format(**names)
        self._row_ends = None if form.row_ends is None else tuple(_id(tokenizer, name) for name in form.row_ends)

    def tokens(self, grid: Grid) -> list[int]:
        """Return the tokens of an image of that many rows and columns."""
        rows, columns = grid
        row = [self.image_id] * columns
        if self._row_ends is None:
            return row * rows
        inner, last = self._row_ends
        return [*([*row, inner] * rows)[:-1], last]

    def num_tokens(self, grid: Grid) -> int:
        """Return how many tokens an image takes."""
        rows, columns = grid
        return rows * (columns + (self._row_ends is not None))

    def text(self, pieces: Pieces) -> str:
        """Return the text to be tokenized: with one image token per image."""
        return self._text.join(pieces)

    def expand(self, token_ids: Sequence[int], pieces: Pieces, grids: Sequence[Grid]) -> tuple[list[int], list[int]]:
        """Return the tokens of ``text(pieces)`` with those of all images in place, and where each image begins."""
        ours: list[bool] = []
        for number, piece in enumerate(pieces):
            ours += ([True] if number else []) + [False] * piece.count(self._image)
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.image_id]
        if len(places) != len(ours):
            raise RequestError(
                f"the prompt has the token of images {len(places)} times where {len(ours)} were written; leave "
                f"{self._image} out of texts",
                param="messages",
            )
        return self._filled(token_ids, [place for place, is_image in zip(places, ours, strict=True) if is_image], grids)

    def expand_ids(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with those of all images in place, and where each image begins.  ``token_ids``
        have one mark per image, or the images' tokens already."""
        if (starts := self._expanded(token_ids, grids)) is not None:
            return list(token_ids), starts
        mark = self._ids(self.marker)
        num_marks = sum(1 for token_id in token_ids if [token_id] == mark)
        if num_marks != len(grids):
            raise RequestError(
                f"the prompt has {num_marks} marks of images ({self.marker}) for {len(grids)} images; give one each",
                param="prompt",
            )
        inner, ids = self._ids(self._text), []
        for token_id in token_ids:
            ids += inner if [token_id] == mark else [token_id]
        return self._filled(ids, [place for place, one in enumerate(ids) if one == self.image_id], grids)

    def _expanded(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> list[int] | None:
        """Where the images of a prompt begin that has all of their tokens; None if it has not."""
        starts, place = [], 0
        for grid in grids:
            try:
                place = token_ids.index(self.image_id, place)
            except ValueError:
                return None
            wanted = self.tokens(grid)
            if list(token_ids[place : place + len(wanted)]) != wanted:
                return None
            starts.append(place)
            place += len(wanted)
        return None if self.image_id in token_ids[place:] else starts

    def _filled(self, ids: Sequence[int], places: Sequence[int], grids: Sequence[Grid]) -> tuple[list[int], list[int]]:
        filled: list[int] = []
        starts, behind = [], 0
        for place, grid in zip(places, grids, strict=True):
            filled += ids[behind:place]
            starts.append(len(filled))
            filled += self.tokens(grid)
            behind = place + 1
        return [*filled, *ids[behind:]], starts

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found


class HiddenMarks:
    """Marks of images in texts that a template is to show as they are: hidden from it, and shown again after it."""

    def __init__(self, marker: str) -> None:
        self._marker, self._hidden = marker, f"imgmark{uuid4().hex}"

    def hide(self, value: Any) -> Any:
        """Return ``value`` with other words for the marks in all of its texts, at any depth."""
        if isinstance(value, str):
            return value.replace(self._marker, self._hidden)
        if isinstance(value, Mapping):
            return {name: self.hide(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(one) for one in value]
        return value

    def pieces(self, text: str) -> Pieces:
        """Divide a text at the marks that it has now, and show the hidden ones again."""
        return tuple(piece.replace(self._hidden, self._marker) for piece in text.split(self._marker))


def _token(tokenizer: Any, what: str, token_id: int | None) -> str:
    found = None if token_id is None or token_id >= len(tokenizer) else tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(found, str) or _id(tokenizer, found) != token_id:
        raise ConfigError(
            f"{what} is {token_id} in config.json, which the tokenizer has not as one token: give the model's own "
            "tokenizer, or serve the text part alone with --limit-mm-per-prompt '{\"image\": 0}'"
        )
    return found


def _id(tokenizer: Any, name: str) -> int:
    found: list[int] = tokenizer.encode(name, add_special_tokens=False)
    if len(found) != 1:
        raise ConfigError(f"the tokenizer has no token {name}, which stands within images of this model")
    return found[0]
