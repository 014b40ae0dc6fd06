"""Tool calls that the request forces: a constraint of the engine makes the text JSON, without markup.

Where a format says how its model writes calls (``ForcedForm``), the constraint makes the text such calls.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.events import ForcedForm, NewCallId, openai_call_id
from tp_engine.api.openai.tools.json_calls import SEPARATORS, ObjectsParser
from tp_engine.api.openai.tools.text_parser import TextParser
from tp_engine.grammar.library import inner_schema

if TYPE_CHECKING:
    from tp_engine.api.openai.structured import TokenWriting
    from tp_engine.api.openai.tools.request import ToolRequest
    from tp_engine.structured_outputs import StructuredOutputsParams


def forced_calls(
    form: ForcedForm, marks: tuple[str, ...], tools: ToolRequest, writing: TokenWriting, like: StructuredOutputsParams
) -> str:
    """Return the grammar, in Lark, of the calls that ``tools`` force, in a model's own ``form``.

    ``marks`` may be special tokens; arguments have white space as in the constraint ``like``.
    """
    pieces = re.compile(f"({'|'.join(map(re.escape, (*sorted(marks, key=len, reverse=True), 'NUMBER')))})")

    def written(text: str, name: str = "") -> str:
        as_json = json.dumps(name, ensure_ascii=False)[1:-1] if '"NAME"' in form.call else name
        parts = filter(None, pieces.split(text))
        return " ".join("NUMBER" if part == "NUMBER" else writing.mark(part.replace("NAME", as_json)) for part in parts)

    before, _, behind = form.call.partition("ARGUMENTS")
    schemas = tools.argument_schemas()
    more = f"({written(form.between)} call)*" if tools.several and tools.name is None else ""
    rules = [
        f"start: {written(form.begin)} call {more} {written(form.end)}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}",
        "NUMBER: /[0-9]{1,4}/",
    ]
    for number, (name, schema) in enumerate(schemas):
        rules.append(f"call_{number}: {written(before, name)} arguments_{number} {written(behind)}")
        rules.append(f"arguments_{number}: %json {inner_schema(schema, like)}")
    return "\n".join(rules)


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
