"""Tool calls as DeepSeek V3.1 models write them: a name and its arguments, without a fence.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Those of DeepSeek V3 and R1 are read too: models that were made from others write one or the other.
"""

import re

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"

BLOCK = CallBlock(
    opens=(OPEN, CALL),
    close=CLOSE,
    between=(CALL_END, FENCE),
    head=re.compile(rf"\s*(?:\w*{SEPARATOR})?\s*([^\s<`]+?)\s*(?:{SEPARATOR}|{FENCE}(?:json)?|)\s*"),
    in_head=(SEPARATOR,),
    drops=(CLOSE, CALL_END),
)
FORMAT = BLOCK.format(
    "DeepSeek V3.1",
    aliases=("deepseekv31",),
    template=(TemplateMarks((OPEN,), lacks=(f"{FENCE}json",)),),
    forced=ForcedForm(begin=OPEN, call=f"{CALL}NAME{SEPARATOR}ARGUMENTS{CALL_END}", end=CLOSE),
)
