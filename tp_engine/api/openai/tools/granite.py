"""Tool calls as Granite 3 models write them: a list behind a mark, and nothing that closes it.

::

    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Some write ``<tool_call>`` instead; Granite 4 writes what Hermes models write, which is read too.
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

BLOCK = CallBlock(opens=("<|tool_call|>", "<tool_call>"), is_closed=False)
FORMAT = BLOCK.format(
    "Granite 3",
    template=(TemplateMarks(("<|tool_call|>",), lacks=("<|/tool|>",)),),
    forced=ForcedForm(
        begin=f"{BLOCK.opens[0]}[", call='{"name": "NAME", "arguments": ARGUMENTS}', between=", ", end="]"
    ),
)
