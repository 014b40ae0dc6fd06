"""Tool calls as Llama 3 models write them: ``{"name": "f", "parameters": {...}}``, several separated by ``;``.

``<|python_tag|>`` may precede a call and is never shown.  Without it an object is a call only if it begins with the
name of one of the request's tools; other braces are content.
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks, ToolFormat
from tp_engine.api.openai.tools.json_calls import ObjectsParser

PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,"


class Llama3JsonToolParser(ObjectsParser):
    """``names`` are the tools of the request."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__((PYTHON_TAG, "{"))
        self._names = names
        self._is_tagged = False  # a call must follow

    def _end(self) -> None:
        is_over = self._state == self._read_between and not self._pending.strip(_SEPARATORS)
        if not is_over and not (self._state == self._read_call and self._reader.started):
            self._give(self._raw + self._pending)

    def _give(self, text: str) -> None:
        super()._give(text)
        self._is_tagged &= not text.strip()

    def _open(self, mark: str) -> None:
        if mark == PYTHON_TAG:
            self._is_tagged = True
            return
        self._begin_call(None if self._is_tagged else self._names, checks_arguments=True)
        self._raw, self._is_tagged = "{", False

    def _read_between(self) -> bool:
        """Behind a call: drop separators if another call follows."""
        rest = self._pending.lstrip(_SEPARATORS)
        if not rest or (PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG):
            return False
        if rest.startswith(self._opens):
            self._pending = rest
        self._state = self._read_text
        return True

    def _end_call(self) -> None:
        self._state = self._read_between

    def _leave_call(self) -> None:
        """An object that is not a call is content; a call may begin behind its first brace."""
        if self._reader.started:
            self._state = self._read_between
        else:
            self._state = self._read_text
            self._give("{")
            self._pending = self._raw[1:] + self._pending
        self._raw = ""


FORMAT = ToolFormat(
    models="Llama 3",
    aliases=("llama3", "llama4_json"),
    marks=(PYTHON_TAG,),
    opens=(PYTHON_TAG,),
    template=(TemplateMarks(("dictionary of argument name and its value",)),),
    forced=ForcedForm(call='{"name": "NAME", "parameters": ARGUMENTS}', between="; "),
    new_parser=lambda tools: Llama3JsonToolParser(tools.names),
)
