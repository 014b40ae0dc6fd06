"""Tool calls as Mistral models write them; the older ones write a list, as Hermes models do within their marks.

::

    [TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}
    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

``[ARGS]`` may be missing, and ``[CALL_ID]`` with an id may come before it.
"""

import re
import uuid

from tp_engine.api.openai.tools.events import TemplateMarks
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
FORMAT = BLOCK.format("Mistral", call_ids=lambda tools: new_call_id, template=(TemplateMarks(("[TOOL_CALLS]",)),))
