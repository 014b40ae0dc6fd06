"""Prompts with images: from a rendered chat, or ``multi_modal_data``, to tokens and the images' data for the engine.

The order is by cost: the headers of all files, then the tokens, then whether they fit; pixels come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tp_engine.api.openai.chat.messages import omitted
from tp_engine.errors import RequestError, shown
from tp_engine.images.image_input import ImageInput
from tp_engine.images.sources import DocumentSource, ImageSource, image_source, is_document_part
from tp_engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tp_engine.images.loading import OpenedImage
    from tp_engine.images.reader import ImageReader  # imports Pillow, which text models do not need


class TextTokens(Protocol):
    """What ``InputProcessor`` does with text."""

    def text_token_ids(self, text: str, *, add_special_tokens: bool, must_fit: bool, param: str) -> list[int]:
        """The token ids of a text."""

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise ``RequestError`` unless these are token ids of the model."""

    def check_length(self, num_tokens: int, params: SamplingParams, pooling: None, param: str) -> None:
        """Raise ``ContextLengthError`` for a prompt that is too long."""


class ImagePrompts:
    """Prompts of one model that takes images; without ``reads_pixels``, only headers of files are read, and no prompt
    has images."""

    def __init__(self, text: TextTokens, reader: ImageReader, *, reads_pixels: bool = True) -> None:
        self.reader = reader
        self._text, self._reads_pixels = text, reads_pixels
        self._marks = reader.placeholders

    @property
    def marker(self) -> str:
        """What the chat template writes for an image."""
        return self._marks.marker

    def with_pages(self, messages: Any) -> Any:
        """A chat's messages with the pages of documents, as images, in the places of these.  Where PDFs are not
        read, a note stands for one in a tool's answer, lest it end the conversation."""
        if not isinstance(messages, (list, tuple)):
            return messages
        found = []
        for index, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, (list, tuple)) and any(map(is_document_part, content)):
                places = ((f"messages[{index}].content[{number}]", part) for number, part in enumerate(content))
                parts = [one for place, part in places for one in self._pages(place, part, message.get("role"))]
                message = {**message, "content": parts}
            found.append(message)
        return found

    def _pages(self, where: str, part: Any, role: object) -> list[Any]:
        if not is_document_part(part):
            return [part]
        if role == "tool" and not self.reader.reads_pdfs:
            return [omitted("file")]
        source = image_source(where, part)
        return self.reader.pages(source) if isinstance(source, DocumentSource) else [source]

    def of_prompt(self, prompt: Mapping[str, Any], *, add_special_tokens: bool, param: str) -> dict[str, Any]:
        """Read the images of a prompt given to ``LLM``, whose text or tokens have a mark for each."""
        sources = _sources(prompt["multi_modal_data"], prompt.get("mm_processor_kwargs"))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(text, str) and token_ids is None:
            pieces = tuple(text.split(self.marker))
            if len(pieces) - 1 != len(sources):
                raise RequestError(
                    f"the prompt has {len(pieces) - 1} marks of images ({self.marker}) for {len(sources)} images; give "
                    "one each",
                    param=param,
                )
            return self.read(sources, pieces, add_special_tokens, param)
        if not isinstance(token_ids, (list, tuple)) or text is not None:
            raise RequestError("give either 'prompt' or 'prompt_token_ids' beside multi_modal_data", param=param)
        self._text.check_token_ids(token_ids, param)
        opened = self.reader.open(sources)
        ids, starts = self._marks.expand_ids(list(token_ids), self.reader.grids(opened))
        self._text.check_length(len(ids), SamplingParams(), None, param)
        return {"prompt_token_ids": ids, "images": self._stage(opened, starts)}

    def read(
        self,
        sources: Sequence[ImageSource],
        pieces: tuple[str, ...],
        add_special_tokens: bool,
        param: str,
        *,
        must_fit: bool = True,
        stages: bool = True,
    ) -> dict[str, Any]:
        """``{"prompt_token_ids", "images"}`` of a text in ``pieces``, with an image between each two; the
        images only if it ``stages`` them."""
        opened = self.reader.open(sources)
        grids = self.reader.grids(opened)
        ids = self._text.text_token_ids(
            self._marks.text(pieces), add_special_tokens=add_special_tokens, must_fit=must_fit, param=param
        )
        ids, starts = self._marks.expand(ids, pieces, grids)
        if not stages:
            return {"prompt_token_ids": ids}
        self._text.check_length(len(ids), SamplingParams(), None, param)
        return {"prompt_token_ids": ids, "images": self._stage(opened, starts)}

    def _stage(self, opened: Sequence[OpenedImage], starts: Sequence[int]) -> tuple[ImageInput, ...]:
        return self.reader.stage(opened, starts) if self._reads_pixels else ()


def without_empty_data(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt of ``LLM`` without ``multi_modal_data`` that has nothing, and without what is nothing in it:
    batches with and without images have the same fields in all rows."""
    if "multi_modal_data" not in prompt:
        return prompt
    data = prompt["multi_modal_data"]
    if isinstance(data, Mapping):
        data = {name: value for name, value in data.items() if not _is_nothing(value)}
    if _is_nothing(data):
        return {
            name: value for name, value in prompt.items() if name not in ("multi_modal_data", "mm_processor_kwargs")
        }
    return {**prompt, "multi_modal_data": data}


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple, Mapping)) and not value)


def _sources(given: object, sizes: object) -> list[ImageSource]:
    """The images of ``multi_modal_data``, with ``sizes`` (``mm_processor_kwargs``)."""
    if not isinstance(given, Mapping) or given.keys() != {"image"}:
        raise RequestError(
            f"multi_modal_data is {shown(given)}; it must be {{'image': one image, or a list of them}}", param="prompt"
        )
    images = given["image"] if isinstance(given["image"], (list, tuple)) else [given["image"]]
    return with_sizes([ImageSource(where=f"image {number}", content=one) for number, one in enumerate(images)], sizes)


def with_sizes(images: Sequence[ImageSource], sizes: object) -> list[ImageSource]:
    """``images`` with the sizes that a request asks for (``mm_processor_kwargs``), unless one has its own."""
    if sizes is None:
        return list(images)
    if not isinstance(sizes, Mapping):
        raise RequestError(
            f"mm_processor_kwargs is {shown(sizes)}; it must be an object such as {{'max_pixels': 1000000}}",
            param="mm_processor_kwargs",
        )
    return [replace(one, sizes={**sizes, **one.sizes}) for one in images]
