"""Tool calls as Seed-OSS models write them: those of Qwen3-Coder in ``<seed:tool_call>...</seed:tool_call>``."""

from dataclasses import replace

from tp_engine.api.openai.tools import qwen3_coder
from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks

OPEN = "<seed:tool_call>"
MARKS = replace(qwen3_coder.MARKS, open=OPEN, close="</seed:tool_call>")
FORMAT = MARKS.format(
    "Seed-OSS",
    template=(TemplateMarks((OPEN,)),),
    forced=ForcedForm(
        begin=OPEN,
        call=qwen3_coder.CALL,
        between=f"{MARKS.close}\n{OPEN}",
        end=MARKS.close,
        arguments=qwen3_coder.ARGUMENTS,
    ),
)
