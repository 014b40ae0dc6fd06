"""Tool calls as DeepSeek V3.2 models write them; a value is text or JSON, as its key says.

::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import MarkedArguments
from tp_engine.api.openai.tools.marked_calls import CallMarks

MARKS = CallMarks(
    open="<｜DSML｜function_calls>",
    close="</｜DSML｜function_calls>",
    call="<｜DSML｜invoke name=",
    call_end="</｜DSML｜invoke>",
    name_ends=("/>", ">"),
    key="<｜DSML｜parameter name=",
    key_end=">",
    value_end="</｜DSML｜parameter>",
    bare=True,
    drops=tuple(f"<{slash}｜DSML｜tool_calls>" for slash in ("", "/")),  # DeepSeek V4's name of a block
)
FORMAT = MARKS.format(
    "DeepSeek V3.2",
    aliases=("deepseekv32",),
    template=(TemplateMarks(("DSML", "function_calls")),),
    forced=ForcedForm(
        begin=f"{MARKS.open}\n",
        call=f'{MARKS.call}"NAME">\nARGUMENTS{MARKS.call_end}\n',
        end=MARKS.close,
        arguments=MarkedArguments(argument=f'{MARKS.key}"KEY" string="IS_TEXT">VALUE{MARKS.value_end}\n'),
    ),
)
