"""Tool calls as LFM2 models write them, in Python: ``<|tool_call_start|>[f(city='Paris')]<|tool_call_end|>``."""

from tp_engine.api.openai.tools.events import TemplateMarks
from tp_engine.api.openai.tools.literal_calls import LiteralMarks

CLOSE = "<|tool_call_end|>"
MARKS = LiteralMarks(opens=("<|tool_call_start|>",), close=CLOSE, drops=(CLOSE,))
FORMAT = MARKS.format("LFM2", template=(TemplateMarks(("<|tool_list_start|>",)), TemplateMarks(("List of tools: [",))))
