"""Tool calls as Llama 3.2 and Llama 4 models write them, in Python: ``[f(city='Paris'), g()]``, and nothing else.

Llama 4 may write ``<|python_start|>`` and ``<|python_end|>`` around the list.
"""

from tp_engine.api.openai.tools.events import TemplateMarks
from tp_engine.api.openai.tools.literal_calls import LiteralMarks

MARKS = LiteralMarks(opens=("<|python_start|>",), close="<|python_end|>", bare=True, drops=("<|python_end|>",))
FORMAT = MARKS.format("Llama 3.2, Llama 4", aliases=("llama4_pythonic",), template=(TemplateMarks(("[func_name1(",)),))
