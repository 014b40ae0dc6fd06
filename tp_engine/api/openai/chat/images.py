"""Where the images of a chat stand in its prompt, for templates that differ in what they show.

Not every template shows images in all roles.  Each of these conversations is tried until one has all images::

    as it is            [tool: text, image]
    after the turn      [tool: text]  [user: image]             images of tools and of the assistant
    in a tool's text    [tool: text + what stands for an image] templates whose roles must alternate: Mistral's
    a note              [tool: text + "[image omitted]"]        lest an error end the conversation

An image of another role that no conversation shows is refused by name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tp_engine.errors import RequestError
from tp_engine.images.placeholders import HiddenMarks, Pieces
from tp_engine.images.sources import ImageSource
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Mapping[str, Any]], str]

_NOTE = "[image omitted]"


def render_images(
    render: Render, variables: Mapping[str, Any], marker: str, images: Sequence[ImageSource]
) -> tuple[Pieces, tuple[ImageSource, ...]]:
    """The pieces of the prompt around its images, and these: all, or all but those of tools.

    ``variables`` have normal messages, in which ``images`` are parts in the same order; ``marker`` is what the template
    writes for one.  Raises ``RequestError`` if it shows fewer.
    """
    marks = HiddenMarks(marker)
    hidden = marks.hide(variables)
    messages: Messages = hidden["messages"]
    refusal: RequestError | None = None
    for conversation in _conversations(render, hidden, marker):
        try:
            pieces = marks.pieces(render({**hidden, "messages": conversation}))
        except RequestError as error:
            refusal = refusal or error
            continue
        if len(pieces) - 1 == len(images):
            return pieces, tuple(images)
    roles = [message["role"] for message in messages for part in _image_parts(message)]
    if "tool" in roles:
        kept = tuple(image for image, role in zip(images, roles, strict=True) if role != "tool")
        pieces = marks.pieces(render({**hidden, "messages": _behind(_in_texts(messages, _NOTE))}))
        if len(pieces) - 1 == len(kept):
            warn_once(logger, "the chat template shows no image of a tool's answer: a note stands there")
            return pieces, kept
    if refusal is not None:
        raise refusal
    own = next((image for image, role in zip(images, roles, strict=True) if role != "user"), images[0])
    raise own.refusal(f"the chat template does not show this one of {len(images)} images; send it in a user's message")


def _conversations(render: Render, variables: Mapping[str, Any], marker: str) -> Iterator[Messages]:
    """The conversations that show all images, from the one that was sent to those that templates may need."""
    messages: Messages = variables["messages"]
    yield messages
    roles = {message["role"] for message in messages if _image_parts(message)}
    if roles & {"tool", "assistant"}:
        yield _behind(messages)
    if "tool" in roles:
        yield _behind(_in_texts(messages, _written(render, variables, marker)))


def _behind(messages: Messages) -> list[dict[str, Any]]:
    """The messages, with the images of tools and of the assistant in a message of the user after their turn."""
    moved: list[dict[str, Any]] = []
    content: Any
    images: list[Mapping[str, Any]] = []
    for message in [*map(dict, messages), {}]:
        role, content = message.get("role", ""), message.get("content")
        goes_on = role == "tool" or (moved and moved[-1]["role"] == role == "assistant")
        if images and role == "user":  # templates refuse two of the user in a row
            own_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message["content"] = [*images, *own_parts]
        elif images and not goes_on:
            moved.append({"role": "user", "content": images})
        if not goes_on:
            images = []
        if role in ("tool", "assistant") and (own := _image_parts(message)):
            images = [*images, *own]
            texts = [part["text"] for part in content if part["type"] == "text"]
            message["content"] = "\n".join(texts) or "[image]"
        moved.append(message)
    return moved[:-1]


def _in_texts(messages: Messages, written: str) -> list[dict[str, Any]]:
    """The messages, with ``written`` for each image in the texts of tools' answers."""
    return [
        {**message, "content": _one_text(message["content"], written)}
        if message["role"] == "tool" and _image_parts(message)
        else dict(message)
        for message in messages
    ]


def _one_text(parts: Sequence[Mapping[str, Any]], written: str) -> str:
    """The texts of ``parts``, separated by line ends, with ``written`` for each image."""
    text, behind_text = "", False
    for part in parts:
        is_text = part["type"] == "text"
        text += ("\n" if is_text and behind_text else "") + (part["text"] if is_text else written)
        behind_text = is_text
    return text


def _written(render: Render, variables: Mapping[str, Any], marker: str) -> str:
    """What the template writes for an image between two texts of the user: the marker and what surrounds it."""
    begin, end = (f"{name}{uuid.uuid4().hex}" for name in ("begin", "end"))
    content = [{"type": "text", "text": begin}, {"type": "image"}, {"type": "text", "text": end}]
    try:
        shown = render({**variables, "messages": [{"role": "user", "content": content}], "tools": None})
    except RequestError:
        return marker
    found = shown.partition(begin)[2].partition(end)[0]
    return found if found.count(marker) == 1 else marker


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
