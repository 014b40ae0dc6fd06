"""Tool calls as MiniMax-M2 models write them; a block may have several calls.

::

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
"""

from tp_engine.api.openai.tools.events import TemplateMarks
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
    "MiniMax-M2", aliases=("minimax-m2",), template=(TemplateMarks(("<minimax:tool_call>",), lacks=("]<]minimax[>[",)),)
)
