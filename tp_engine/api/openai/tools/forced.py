"""Tool calls that the request forces: a constraint of the engine makes the text JSON, without markup.

Where a format says how its model writes calls (``ForcedForm``), the constraint makes the text such calls.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.events import ForcedForm, NewCallId, openai_call_id
from tp_engine.api.openai.tools.forced_arguments import FormWriting
from tp_engine.api.openai.tools.json_calls import SEPARATORS, ObjectsParser
from tp_engine.api.openai.tools.text_parser import TextParser

if TYPE_CHECKING:
    from tp_engine.api.openai.structured import TokenWriting
    from tp_engine.api.openai.tools.request import ToolRequest
    from tp_engine.structured_outputs import StructuredOutputsParams


def forced_calls(
    form: ForcedForm, marks: tuple[str, ...], tools: ToolRequest, tokens: TokenWriting, like: StructuredOutputsParams
) -> str:
    """Return the grammar, in Lark, of the calls that ``tools`` force, in a model's own ``form``.

    ``marks`` may be special tokens; arguments have white space as in the constraint ``like``.
    """
    writing = FormWriting(marks, tokens, like)
    before, _, behind = form.call.partition("ARGUMENTS")
    schemas = tools.argument_schemas()
    more = f"({writing.text(form.between)} call)*" if tools.several and tools.name is None else ""
    rules = [
        f"start: {writing.text(form.begin)} call {more} {writing.text(form.end)}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}",
        "NUMBER: /[0-9]{1,4}/",
    ]
    for number, (name, schema) in enumerate(schemas):
        called = before.replace("NAME", json.dumps(name, ensure_ascii=False)[1:-1] if '"NAME"' in before else name)
        rules.append(f"call_{number}: {writing.text(called)} arguments_{number} {writing.text(behind)}")
        rules += form.arguments.rules(f"arguments_{number}", schema, writing)
    return "\n".join([*rules, *writing.rules])


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
