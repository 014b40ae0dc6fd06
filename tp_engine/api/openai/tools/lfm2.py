"""Tool calls as LFM2 models write them, in Python: ``<|tool_call_start|>[f(city='Paris')]<|tool_call_end|>``."""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.literal_calls import LiteralMarks
from tp_engine.api.openai.tools.pythonic import ARGUMENTS, CALL

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
MARKS = LiteralMarks(opens=(OPEN,), close=CLOSE, echoes=True, drops=(CLOSE,))
FORMAT = MARKS.format(
    "LFM2",
    template=(TemplateMarks(("<|tool_list_start|>",)), TemplateMarks(("List of tools: [",))),
    forced=ForcedForm(begin=f"{OPEN}[", call=CALL, between=", ", end=f"]{CLOSE}", arguments=ARGUMENTS),
)
