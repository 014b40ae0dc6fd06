"""Tool calls as Qwen3-Coder models write them; they sometimes leave out ``<tool_call>``.

::

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

from tp_engine.api.openai.tools.events import ToolFormat
from tp_engine.api.openai.tools.marked_calls import CallMarks, MarkedCallsParser

MARKS = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    call="<function=",
    call_end="</function>",
    name_ends=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    value_breaks=("</function>\n</tool_call>", "</function></tool_call>"),
    own_lines=True,
    bare=True,
)
FORMAT = ToolFormat(models="Qwen3-Coder", marks=MARKS.all, new_parser=lambda tools: MarkedCallsParser(MARKS, tools))
