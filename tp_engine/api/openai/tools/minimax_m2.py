"""Tool calls as MiniMax-M2 models write them; a block may have several calls.

::

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import MarkedArguments
from tp_engine.api.openai.tools.marked_calls import CallMarks

MARKS = CallMarks(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    call="<invoke name=",
    call_end="</invoke>",
    name_ends=(">",),
    key="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    own_lines=True,
)
FORMAT = MARKS.format(
    "MiniMax-M2",
    aliases=("minimax-m2",),
    template=(TemplateMarks(("<minimax:tool_call>",), lacks=("]<]minimax[>[",)),),
    forced=ForcedForm(
        begin=f"{MARKS.open}\n",
        call='<invoke name="NAME">\nARGUMENTS</invoke>\n',
        end=MARKS.close,
        arguments=MarkedArguments(argument='<parameter name="KEY">VALUE</parameter>\n'),
    ),
)
