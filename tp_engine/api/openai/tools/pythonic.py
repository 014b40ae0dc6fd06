"""Tool calls as Llama 3.2 and Llama 4 models write them, in Python: ``[f(city='Paris'), g()]``, and nothing else.

Llama 4 may write ``<|python_start|>`` and ``<|python_end|>`` around the list.
"""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import LiteralArguments
from tp_engine.api.openai.tools.literal_calls import LiteralMarks

MARKS = LiteralMarks(opens=("<|python_start|>",), close="<|python_end|>", bare=True, drops=("<|python_end|>",))
# How a call is written, and its arguments.
CALL = "NAME(ARGUMENTS)"
ARGUMENTS = LiteralArguments(equals="=", between=", ")
FORMAT = MARKS.format(
    "Llama 3.2, Llama 4",
    aliases=("llama4_pythonic",),
    template=(TemplateMarks(("[func_name1(",)),),
    forced=ForcedForm(begin="[", call=CALL, between=", ", end="]", arguments=ARGUMENTS),
)
