"""Tool calls as Phi-4-mini models write them: ``functools[{"name": "f", "arguments": {...}}, ...]``.

They also write ``<|tool_call|>[...]<|/tool_call|>``.
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

OPEN = "functools["
BLOCK = CallBlock(opens=(OPEN, "<|tool_call|>"), close="<|/tool_call|>", is_closed=False)
FORMAT = BLOCK.format(
    "Phi-4-mini",
    template=(TemplateMarks(("<|/tool|>",)), TemplateMarks((OPEN,))),
    forced=ForcedForm(begin=OPEN, call='{"name": "NAME", "arguments": ARGUMENTS}', between=", ", end="]"),
)
