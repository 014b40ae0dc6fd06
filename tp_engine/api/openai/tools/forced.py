"""Tool calls that the request forces: a constraint of the engine makes the text JSON, without markup."""

from tp_engine.api.openai.tools.events import NewCallId, openai_call_id
from tp_engine.api.openai.tools.json_calls import SEPARATORS, ObjectsParser
from tp_engine.api.openai.tools.text_parser import TextParser


class CallListParser(ObjectsParser):
    """The parser for ``tool_choice: required``: the text is ``[{"name": "f", "parameters": {...}}, ...]``.

    Other text, which only a model without the constraint can write, is content.
    """

    def __init__(self, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__((), new_call_id=new_call_id)
        self._state = self._read_list

    def _read_list(self) -> bool:
        char = self._pending[0]
        if char not in SEPARATORS and char != "{":
            self._leave_call()
            return True
        self._raw, self._pending = self._raw + char, self._pending[1:]
        if char == "{":
            self._begin_call()
        return True

    def _read_content(self) -> bool:
        self._sink.content(self._pending)
        self._pending = ""
        return False

    def _end_call(self) -> None:
        self._state = self._read_list

    def _leave_call(self) -> None:
        self._end()
        self._state, self._raw = self._read_content, ""

    def _end(self) -> None:
        if not self._sink.num_calls:
            self._sink.content(self._raw)


class NamedCallParser(TextParser):
    """The parser for a ``tool_choice`` that names a function: the text is its arguments."""

    def __init__(self, name: str, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__((), new_call_id=new_call_id)
        self._name = name
        self._state = self._read_beginning

    def _read_beginning(self) -> bool:
        self._pending = self._pending.lstrip()
        if self._pending:
            self._sink.start_call(self._name)
            self._state = self._read_arguments
        return bool(self._pending)

    def _read_arguments(self) -> bool:
        self._sink.arguments(0, self._pending)
        self._pending = ""
        return False
