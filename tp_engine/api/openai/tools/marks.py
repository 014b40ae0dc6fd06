"""The marks of tool calls, as models and their chat templates write them; ``formats.py`` makes formats of them."""

import re
from dataclasses import replace

from tp_engine.api.openai.tools.ernie45 import OPEN as RESPONSE
from tp_engine.api.openai.tools.json_calls import CallBlock
from tp_engine.api.openai.tools.marked_calls import CallMarks

FENCE = "```"
HERMES = CallBlock(opens=("<tool_call>",))
# Marks of other formats whose templates have the same opening mark.
LIKE_HERMES = ("<arg_key>", "<function=", "<|tool_call|>", "<|tool_call>", RESPONSE, "<tool_calls>",
                "<minimax:tool_call>", "]<]minimax[>[")  # fmt: skip

# DeepSeek V3 and R1 have a kind before the name, and the arguments in a fence; V3.1 has neither.  Both are read, since
# models that were made from others write one or the other.
DEEPSEEK_OPEN, DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK = CallBlock(
    opens=(DEEPSEEK_OPEN, DEEPSEEK_CALL),
    close=DEEPSEEK_CLOSE,
    between=(DEEPSEEK_END, FENCE),
    head=re.compile(rf"\s*(?:\w*{SEPARATOR})?\s*([^\s<`]+?)\s*(?:{SEPARATOR}|{FENCE}(?:json)?|)\s*"),
    in_head=(SEPARATOR,),
    drops=(DEEPSEEK_CLOSE, DEEPSEEK_END),
)

KIMI_OPEN, KIMI_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
# Kimi K2 reads the name of an earlier call from its id alone, and stops calling when ids look different.
KIMI_ID = "functions.{name}:{number}"

COHERE_OPEN, COHERE_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
COHERE_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
GRANITE = CallBlock(opens=("<|tool_call|>", "<tool_call>"), is_closed=False)
FUNCTOOLS = "functools["

DSML = CallMarks(
    open="<｜DSML｜function_calls>",
    close="</｜DSML｜function_calls>",
    call="<｜DSML｜invoke name=",
    call_end="</｜DSML｜invoke>",
    name_ends=("/>", ">"),
    key="<｜DSML｜parameter name=",
    key_end=">",
    value_end="</｜DSML｜parameter>",
    bare=True,
    drops=tuple(f"<{slash}｜DSML｜tool_calls>" for slash in ("", "/")),  # DeepSeek V4's name of a block
)
DSML_V4 = replace(DSML, open=DSML.drops[0], close=DSML.drops[1], drops=(DSML.open, DSML.close))
MINIMAX = CallMarks(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    call="<invoke name=",
    call_end="</invoke>",
    name_ends=(">",),
    key="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    own_lines=True,
)
QWEN_CODER = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    call="<function=",
    call_end="</function>",
    name_ends=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    own_lines=True,
    bare=True,
)
# CDATA stands around a value with characters of XML, or of several lines.
MINICPM5 = CallMarks(
    open="<tool_call>",
    close="</tool_call>",
    call="<function name=",
    call_end="</function>",
    name_ends=(">",),
    key="<param name=",
    key_end=">",
    value_end="</param>",
    verbatim=("<![CDATA[", "]]>"),
    bare=True,
)
SEED = replace(QWEN_CODER, open="<seed:tool_call>", close="</seed:tool_call>")

SOLAR_OPEN, SOLAR_CLOSE = "<|tool_calls|>", "<|calls|>"
SOLAR_CALL, SOLAR_CALL_END = "<|tool_call:begin|>", "<|tool_call:end|>"
SOLAR_NAME, SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
SOLAR_MESSAGE, SOLAR_CONTENT, SOLAR_END = "<|begin|>assistant", "<|content|>", "<|end|>"
SOLAR_HEADS = (SOLAR_MESSAGE + SOLAR_CONTENT, SOLAR_MESSAGE, SOLAR_CONTENT)
TOOLCALL_OPEN, TOOLCALL_CLOSE = "<TOOLCALL>", "</TOOLCALL>"

GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_DROPS = ("<|channel>thought\n<channel|>", "<channel|>", "<|tool_response>")
PYTHON_END = "<|python_end|>"
LFM2_OPEN, LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_OPEN, OLMO_CLOSE = "<function_calls>", "</function_calls>"
