"""Tool calls as Kimi K2 models write them: an id, which has the function's name, and the arguments.

::

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

The number counts the calls of the conversation.  The models read the name of an earlier call from its id alone, and
stop calling when ids look different; so all ids have this form, also those of the messages that a client sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
ID = "functions.{name}:{number}"


def call_ids(tools: ToolRequest) -> Callable[[str], str]:
    """Return what makes the ids of one answer's calls; they go on behind those of the conversation."""
    numbers = count(tools.num_earlier_calls)
    return lambda name: ID.format(name=name, number=next(numbers))


BLOCK = CallBlock(
    opens=(OPEN, CALL),
    close=CLOSE,
    is_closed=False,
    between=(CALL_END,),
    head=re.compile(r"\s*(?:functions\.)?([^\s<>{}\"',:]+):\d+\s*"),
    arguments=ARGUMENTS,
    drops=(CLOSE, CALL_END),
)
FORMAT = BLOCK.format(
    "Kimi K2",
    call_ids=call_ids,
    numbered_id=ID,
    template=(TemplateMarks((OPEN,)),),
    forced=ForcedForm(begin=OPEN, call=f"{CALL}functions.NAME:NUMBER{ARGUMENTS}ARGUMENTS{CALL_END}", end=CLOSE),
)
