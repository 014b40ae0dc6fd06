"""Tool calls as Mistral models write them; the older ones write a list, as Hermes models do within their marks.

::

    [TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}
    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

``[ARGS]`` may be missing, and ``[CALL_ID]`` with an id may come before it.
"""

from __future__ import annotations

import json
import re
import uuid

from tp_engine.api.openai.tools.events import ChatEvent, ToolFormat, first_mark, partial_suffix
from tp_engine.api.openai.tools.hermes import HermesToolParser

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LIST = "[{"
_NAME = re.compile(r"[^\s\[\]{}<>\"',]+")
_MAX_HEAD = 512


def new_call_id() -> str:
    """Nine letters and digits: the models' chat templates refuse other ids."""
    return uuid.uuid4().hex[:9]


class MistralToolParser(HermesToolParser):
    """A ``ToolParser``: that of Hermes, which knows names before arguments too."""

    def __init__(self) -> None:
        super().__init__((OPEN,), closes=False, new_call_id=new_call_id)
        self._is_named = False  # the reader's call: its text is the arguments

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if not cut_off and self._raw == OPEN and self._pending.strip():  # no call has begun
            self._prose.add(self._raw + self._pending)
            self._pending = ""
        return super().finish(cut_off=cut_off)

    def _read_block(self) -> bool:
        rest = self._pending.lstrip()
        if self._raw != OPEN or rest.startswith(tuple(_LIST)) or not rest:
            self._is_named = False
            return bool(rest or self._raw != OPEN) and super()._read_block()
        return self._read_head()

    def _read_head(self) -> bool:
        """From the name up to the brace of the arguments; False if that needs more text."""
        found = first_mark(self._pending, (ARGUMENTS, "{"))
        length = len(self._pending) - partial_suffix(self._pending, ARGUMENTS) if found is None else found[0]
        if found is None and length <= _MAX_HEAD:
            return False
        name = self._pending[:length].partition(CALL_ID)[0].strip()
        if found is None or length > _MAX_HEAD or not _NAME.fullmatch(name):
            self._not_a_call()
            return True
        head = length + (len(ARGUMENTS) if found[1] == ARGUMENTS else 0)
        arguments = self._pending[head:].lstrip()
        if not arguments:
            return False
        if not arguments.startswith("{"):
            self._not_a_call()
            return True
        self._pending, self._is_named = arguments, True
        self._begin_call()
        for char in f'"name": {json.dumps(name)}, "arguments": ':
            self._reader.push(char, 0)
        self._prose.note_call()
        return True

    def _push(self, position: int) -> int:
        size = super()._push(position)
        if self._is_named and self._reader.has_whole_arguments:
            self._reader.push("}", 0)
        return size


FORMAT = ToolFormat(
    models="Mistral",
    marks=(OPEN, ARGUMENTS, CALL_ID),
    opens=(OPEN,),
    new_parser=lambda tools: MistralToolParser(),
    new_call_id=new_call_id,
)
