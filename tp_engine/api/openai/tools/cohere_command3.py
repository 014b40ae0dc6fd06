"""Tool calls as Command R7B and Command A models write them; an answer stands between marks too.

::

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, ...]<|END_ACTION|>
    <|START_RESPONSE|>It is 4.<|END_RESPONSE|>
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
RESPONSES = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
BLOCK = CallBlock(opens=(OPEN,), close=CLOSE, drops=(*RESPONSES, CLOSE))
FORMAT = BLOCK.format(
    "Command R7B, Command A",
    template=(TemplateMarks((OPEN, RESPONSES[0])),),
    forced=ForcedForm(
        begin=f"{OPEN}[\n    ",
        call='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}',
        between=",\n    ",
        end=f"\n]{CLOSE}",
    ),
)
