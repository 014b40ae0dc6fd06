"""Tool calls as GLM-4.5 to 4.7 models write them; a line end between name and arguments may be missing.

::

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>
"""

from tp_engine.api.openai.tools.events import TemplateMarks
from tp_engine.api.openai.tools.marked_calls import CallMarks

MARKS = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    value_breaks=("</tool_call>",),
)
FORMAT = MARKS.format(
    "GLM-4.5 to 5", aliases=("glm47", "glm"), template=(TemplateMarks(("<tool_call>", "<arg_key>", "[gMASK]")),)
)
