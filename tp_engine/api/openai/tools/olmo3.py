"""Tool calls as OLMo 3 models write them, in Python, one a line: ``<function_calls>f(a='x')</function_calls>``."""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.literal_calls import LiteralMarks
from tp_engine.api.openai.tools.pythonic import ARGUMENTS, CALL

OPEN = "<function_calls>"
MARKS = LiteralMarks(opens=(OPEN,), close="</function_calls>")
FORMAT = MARKS.format(
    "OLMo 3",
    template=(
        TemplateMarks((OPEN,), lacks=("DSML",)),
        TemplateMarks(("<functions>", "function_calls"), lacks=("DSML",)),
    ),
    forced=ForcedForm(begin=OPEN, call=CALL, between="\n", end=MARKS.close, arguments=ARGUMENTS),
)
