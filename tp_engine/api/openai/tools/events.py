"""What parsers of generated text find.

A stream sends each event as a delta, a whole answer joins them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins; ``index`` counts the calls of one answer from 0.  Its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces joined are JSON text, as the model wrote it."""

    index: int
    text: str


# From the name of a function to the id of its next call.
NewCallId: TypeAlias = Callable[[str], str]
ChatEvent: TypeAlias = ReasoningText | ContentText | CallStarted | CallArguments


def unread_arguments(text: object) -> dict[str, object]:
    """The object that stands for text that is not arguments, as Anthropic's documentation advises.

    An empty one would be a call with defaults, which clients run.
    """
    return {"INVALID_JSON": text}


def openai_call_id(name: str) -> str:
    """A fresh id of a call of ``name``, as OpenAI's API writes it."""
    return f"call_{uuid.uuid4().hex[:24]}"
