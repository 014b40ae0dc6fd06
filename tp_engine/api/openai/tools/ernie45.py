"""Tool calls as ERNIE 4.5 models write them: those of Hermes, beside an answer in ``<response>...</response>``.

::

    BEFORE --<response>--> INSIDE --</response>--> BEHIND
       +-- anything else --------------------------> PLAIN
"""

import enum

from tp_engine.api.openai.tools.events import ChatEvent
from tp_engine.api.openai.tools.json_calls import CallBlock, JsonCallsParser
from tp_engine.api.openai.tools.text_parser import partial_suffix

OPEN, CLOSE = "<response>", "</response>"


class _TextPart(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    PLAIN = enum.auto()


class ResponseMarks:
    """Drops the marks around an answer and the white space beside them; the joined text is the same for every split.

    The opening mark counts at the beginning of the answer only.
    """

    def __init__(self, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._opening, self._closing = opening, closing
        self._state = _TextPart.BEFORE
        self._pending = ""
        self._has_text = False

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that is certain now."""
        if self._state is _TextPart.PLAIN:
            return text
        self._pending += text
        if self._state is _TextPart.BEFORE:
            self._read_beginning()
        shown = self._read_inside() if self._state is _TextPart.INSIDE else ""
        if self._state is _TextPart.BEHIND and self._pending.strip():
            self._state = _TextPart.PLAIN
        if self._state is _TextPart.PLAIN:
            shown, self._pending = shown + self._pending, ""
        return shown

    def finish(self, *, cut_off: bool) -> str:
        """Return the text that was held back.  ``cut_off``: a limit ended the text; drop half a mark."""
        pending, self._pending = self._pending, ""
        return "" if cut_off or self._state is _TextPart.BEHIND else pending

    def _read_beginning(self) -> None:
        solid = self._pending.lstrip()
        if solid.startswith(self._opening):
            self._state, self._pending = _TextPart.INSIDE, solid[len(self._opening) :]
        elif not self._opening.startswith(solid):
            self._state = _TextPart.PLAIN

    def _read_inside(self) -> str:
        text = self._pending if self._has_text else self._pending.lstrip()
        before, mark, after = text.partition(self._closing)
        if mark:
            self._state, self._pending = _TextPart.BEHIND, after
            return before.rstrip()
        shown = text[: len(text) - partial_suffix(text, self._closing)].rstrip()
        self._has_text |= bool(shown)
        self._pending = text[len(shown) :]
        return shown


class Ernie45ToolParser(JsonCallsParser):
    """The parser of Hermes, behind ``ResponseMarks``."""

    def __init__(self, block: CallBlock) -> None:
        super().__init__(block)
        self._response = ResponseMarks()

    def feed(self, text: str) -> list[ChatEvent]:
        return super().feed(self._response.feed(text))

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        return super().feed(self._response.finish(cut_off=cut_off)) + super().finish(cut_off=cut_off)
