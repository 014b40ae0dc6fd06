"""Tool calls as GLM-4.5 to 4.7 models write them; the latter write no line ends between marks.

::

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import MarkedArguments
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
_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
FORMAT = MARKS.format(
    "GLM-4.5 to 5",
    aliases=("glm47", "glm"),
    template=(TemplateMarks(("<tool_call>", "<arg_key>", "[gMASK]")),),
    forced=ForcedForm(
        call="<tool_call>NAME\nARGUMENTS</tool_call>",
        between="\n",
        arguments=MarkedArguments(argument=_ARGUMENT),
        others=(
            ForcedForm(
                call="<tool_call>NAMEARGUMENTS</tool_call>",
                arguments=MarkedArguments(argument=_ARGUMENT.replace("\n", "")),
            ),
        ),
    ),
)
