"""Tool calls as ERNIE 4.5 models write them: those of Hermes, beside an answer in ``<response>...</response>``."""

from collections.abc import Iterator

from tp_engine.api.openai.tools.events import ChatEvent
from tp_engine.api.openai.tools.json_calls import CallBlock, JsonCallsParser
from tp_engine.api.openai.tools.text_parser import partial_suffix

OPEN, CLOSE = "<response>", "</response>"


class ResponseMarks:
    """Drops the marks around an answer and the white space beside them; the joined text is the same for every split.

    The opening mark counts at the beginning of the answer only.
    """

    def __init__(self, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._pending = ""
        self._is_behind = False  # after the closing mark
        self._reading = self._read(opening, closing)

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that is certain now."""
        self._pending += text
        return next(self._reading)

    def finish(self, *, cut_off: bool) -> str:
        """The text that was held back.  ``cut_off``: a limit ended the text; drop half a mark."""
        return "" if cut_off or self._is_behind else self._pending

    def _read(self, opening: str, closing: str) -> Iterator[str]:
        """Read the pending text, and yield what is shown of it each time that it has grown."""
        while opening.startswith(solid := self._pending.lstrip()) and solid != opening:
            yield ""
        before = ""
        if solid.startswith(opening):
            has_text, self._pending = False, solid[len(opening) :]
            while closing not in self._pending:
                text = self._pending if has_text else self._pending.lstrip()
                shown = text[: len(text) - partial_suffix(text, closing)].rstrip()
                has_text |= bool(shown)
                self._pending = text[len(shown) :]
                yield shown
            before, _, self._pending = self._pending.partition(closing)
            before = before.rstrip() if has_text else before.strip()
            self._is_behind = True
            while not self._pending.strip():
                yield before
                before = ""
            self._is_behind = False
        while True:
            shown, self._pending = before + self._pending, ""
            yield shown
            before = ""


class Ernie45ToolParser(JsonCallsParser):
    """The parser of Hermes, after ``ResponseMarks``."""

    def __init__(self, block: CallBlock) -> None:
        super().__init__(block)
        self._response = ResponseMarks()

    def feed(self, text: str) -> list[ChatEvent]:
        return super().feed(self._response.feed(text))

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        return super().feed(self._response.finish(cut_off=cut_off)) + super().finish(cut_off=cut_off)
