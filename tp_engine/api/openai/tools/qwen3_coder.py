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

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import MarkedArguments
from tp_engine.api.openai.tools.marked_calls import CallMarks

MARKS = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    call="<function=",
    call_end="</function>",
    name_ends=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    own_lines=True,
    bare=True,
)
# How calls are written between the marks of a block, one for each call.
CALL = "\n<function=NAME>\nARGUMENTS</function>\n"
ARGUMENTS = MarkedArguments(argument="<parameter=KEY>\nVALUE\n</parameter>\n")
FORMAT = MARKS.format(
    "Qwen3-Coder, Qwen3.5, Nemotron 3",
    aliases=("qwen3_xml", "step3p5", "nanbeige"),
    template=(TemplateMarks(("<tool_call>", "<function=", "<parameter="), lacks=("<seed:tool_call>",)),),
    forced=ForcedForm(
        begin=MARKS.open, call=CALL, between=f"{MARKS.close}\n{MARKS.open}", end=MARKS.close, arguments=ARGUMENTS
    ),
)
