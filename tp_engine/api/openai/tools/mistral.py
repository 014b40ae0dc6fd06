"""Tool calls as Mistral models write them; the older ones write a list, as Hermes models do within their marks.

::

    [TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}
    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

``[ARGS]`` may be missing.
"""

import re
import uuid
from dataclasses import replace

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock


def new_call_id(name: str) -> str:
    """Nine letters and digits: the models' chat templates refuse other ids."""
    return uuid.uuid4().hex[:9]


BLOCK = CallBlock(
    opens=("[TOOL_CALLS]",),
    is_closed=False,
    head=re.compile(r"\s*([^\s\[\]{}<>\"',]+)\s*(?:\[CALL_ID\].*)?", re.DOTALL),
    arguments="[ARGS]",
    in_head=("[CALL_ID]",),
)
_LIST = ForcedForm(begin="[TOOL_CALLS][", call='{"name": "NAME", "arguments": ARGUMENTS}', between=", ", end="]")
FORMAT = BLOCK.format(
    "Mistral",
    call_ids=lambda tools: new_call_id,
    template=(TemplateMarks(("[TOOL_CALLS]",)),),
    forced=ForcedForm(
        call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        others=(
            ForcedForm(call="[TOOL_CALLS]NAME[CALL_ID]IDENTIFIER[ARGS]ARGUMENTS"),
            _LIST,
            replace(_LIST, begin="[TOOL_CALLS] ["),  # the tokenizers of the first ones put a space behind a mark
        ),
    ),
)
