"""Tool calls that the request forces: a constraint of the engine makes the text such calls.

They are in the model's own form (``ForcedForm``), or JSON without marks if that form is unknown or does not fit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.events import NewCallId, openai_call_id
from tp_engine.api.openai.tools.forced_arguments import WORDS, FormWriting
from tp_engine.api.openai.tools.json_calls import SEPARATORS, ObjectsParser
from tp_engine.api.openai.tools.text_parser import EndOfTextError, NoCallError, Reading, TextParser
from tp_engine.api.openai.tools.tool_format import ForcedForm

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest
    from tp_engine.api.openai.tools.token_writing import TokenWriting
    from tp_engine.requests.structured_outputs import StructuredOutputsParams

_SEPARATORS = re.compile(f"[{re.escape(SEPARATORS)}]*")


def forced_calls(
    form: ForcedForm, marks: tuple[str, ...], tools: ToolRequest, tokens: TokenWriting, like: StructuredOutputsParams
) -> str:
    """The grammar, in Lark, of the calls that ``tools`` force, in a model's own ``form``.

    ``marks`` may be special tokens; arguments have white space as in the constraint ``like``.
    """
    writing, versions, schemas = FormWriting(marks, tokens, like), form.versions, tools.argument_schemas()
    writing.add("start", *(f"calls_{place}" for place in range(len(versions))))
    for word, terminal in WORDS.items():
        writing.add(word, terminal)
    ways = list(dict.fromkeys(version.arguments for version in versions))
    for place, way in enumerate(ways):
        for number, (_, schema) in enumerate(schemas):
            way.write(f"arguments_{place}_{number}", schema, writing)
    for place, version in enumerate(versions):
        call, way_place = f"call_{place}", ways.index(version.arguments)
        more = f"({writing.text(version.between)} {call})*" if tools.several and tools.name is None else ""
        writing.add(f"calls_{place}", f"{writing.text(version.begin)} {call} {more} {writing.text(version.end)}")
        writing.add(call, *(f"{call}_{number}" for number in range(len(schemas))))
        before, _, behind = version.call.partition("ARGUMENTS")
        for number, (name, _) in enumerate(schemas):  # a name of letters, digits, dots and hyphens: itself in JSON
            start, end = writing.text(before, name), writing.text(behind)
            writing.add(f"{call}_{number}", f"{start} arguments_{way_place}_{number} {end}")
    return "\n".join(writing.rules)


class CallListParser(ObjectsParser):
    """The parser for ``tool_choice: required``: the text is ``[{"name": "f", "parameters": {...}}, ...]``.

    Other text, which only a model without the constraint can write, is content.
    """

    def __init__(self, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__((), new_call_id=new_call_id)

    def _read(self) -> Reading[None]:
        self._is_unsure = True
        try:
            while (yield from self._next(_SEPARATORS)) == "{":
                self._at += 1
                yield from self._read_call()
        except EndOfTextError:
            if not self._sink.num_calls:
                self._sink.content(self._pending)
            raise
        except NoCallError:
            pass
        if self._sink.num_calls:
            self._take(self._at)
        while True:
            self._sink.content(self._take(len(self._pending)))
            yield


class NamedCallParser(TextParser):
    """The parser for a ``tool_choice`` that names a function: the text is its arguments."""

    def __init__(self, name: str, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__((), new_call_id=new_call_id)
        self._name = name

    def _read(self) -> Reading[None]:
        yield from self._next()
        self._take(self._at)
        self._sink.start_call(self._name)
        while True:
            self._sink.arguments(self._take(len(self._pending)))
            yield
