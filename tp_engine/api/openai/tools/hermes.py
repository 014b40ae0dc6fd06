"""Tool calls as Hermes, Qwen and others write them: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``."""

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.json_calls import CallBlock

BLOCK = CallBlock(opens=("<tool_call>",))
# Marks of other formats whose templates have the same opening mark.
_OTHERS = (
    "<arg_key>",
    "<function=",
    "<|tool_call|>",
    "<|tool_call>",
    "<response>",
    "<tool_calls>",
    "<minimax:tool_call>",
    "]<]minimax[>[",
)
_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
FORMAT = BLOCK.format(
    "Qwen, Hermes, EXAONE 4, Granite 4",
    aliases=("qwen", "qwen25", "qwen3_json", "granite4"),
    template=(TemplateMarks(("<tool_call>",), lacks=_OTHERS),),
    forced=ForcedForm(
        call=f"<tool_call>\n{_CALL}\n</tool_call>",
        between="\n",
        others=(ForcedForm(call=f"<tool_call>{_CALL}</tool_call>", between="\n"),),  # EXAONE 4
    ),
)
