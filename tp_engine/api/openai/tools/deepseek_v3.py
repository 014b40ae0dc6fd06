"""Tool calls as DeepSeek V3 and R1 models write them: a kind, a name, and the arguments in a fence.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from tp_engine.api.openai.tools.deepseek_v31 import BLOCK, CALL, CALL_END, CLOSE, FENCE, OPEN, SEPARATOR
from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks

FORM = ForcedForm(
    begin=OPEN,
    call=f"{CALL}function{SEPARATOR}NAME\n{FENCE}json\nARGUMENTS\n{FENCE}{CALL_END}",
    between="\n",
    end=CLOSE,
)
FORMAT = BLOCK.format(
    "DeepSeek V3, R1", aliases=("deepseekv3",), template=(TemplateMarks((OPEN, f"{FENCE}json")),), forced=FORM
)
