"""The formats of tool calls: for each the marks that its reader finds, and how its models write calls that are forced.

Most are rows of marks for one of three readers; ``json_calls.py`` reads JSON objects behind a mark, ``marked_calls.py``
arguments between marks, and ``literal_calls.py`` calls as in a program.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools import harmony
from tp_engine.api.openai.tools.ernie45 import OPEN as RESPONSE
from tp_engine.api.openai.tools.ernie45 import Ernie45ToolParser
from tp_engine.api.openai.tools.forced_arguments import LiteralArguments, MarkedArguments
from tp_engine.api.openai.tools.json_calls import PYTHON_TAG, CallBlock, Llama3JsonToolParser
from tp_engine.api.openai.tools.literal_calls import LiteralMarks
from tp_engine.api.openai.tools.literals import Language
from tp_engine.api.openai.tools.marked_calls import CallMarks
from tp_engine.api.openai.tools.tool_format import ForcedForm, TemplateMarks, ToolFormat

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_FENCE = "```"
_PYTHON_CALL = "NAME(ARGUMENTS)"
_PYTHON_ARGUMENTS = LiteralArguments(equals="=", between=", ")

_HERMES = CallBlock(opens=("<tool_call>",))
_HERMES_FORM = ForcedForm(
    call=f"<tool_call>\n{_OBJECT}\n</tool_call>",
    between="\n",
    others=(ForcedForm(call=f"<tool_call>{_OBJECT}</tool_call>", between="\n"),),  # EXAONE 4
)
# Marks of other formats whose templates have the same opening mark.
_LIKE_HERMES = ("<arg_key>", "<function=", "<|tool_call|>", "<|tool_call>", RESPONSE, "<tool_calls>",
                "<minimax:tool_call>", "]<]minimax[>[")  # fmt: skip

# DeepSeek V3 and R1 have a kind before the name, and the arguments in a fence; V3.1 has neither.  Both are read, since
# models that were made from others write one or the other.
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK = CallBlock(
    opens=(_DEEPSEEK_OPEN, _DEEPSEEK_CALL),
    close=_DEEPSEEK_CLOSE,
    between=(_DEEPSEEK_END, _FENCE),
    head=re.compile(rf"\s*(?:\w*{_SEPARATOR})?\s*([^\s<`]+?)\s*(?:{_SEPARATOR}|{_FENCE}(?:json)?|)\s*"),
    in_head=(_SEPARATOR,),
    drops=(_DEEPSEEK_CLOSE, _DEEPSEEK_END),
)

_KIMI_OPEN, _KIMI_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
# Kimi K2 reads the name of an earlier call from its id alone, and stops calling when ids look different.
_KIMI_ID = "functions.{name}:{number}"

_COHERE_OPEN, _COHERE_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
COHERE_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_GRANITE = CallBlock(opens=("<|tool_call|>", "<tool_call>"), is_closed=False)
_MISTRAL_LIST = ForcedForm(begin="[TOOL_CALLS][", call=_OBJECT, between=", ", end="]")
_FUNCTOOLS = "functools["

_DSML = CallMarks(
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
_DSML_V4 = replace(_DSML, open=_DSML.drops[0], close=_DSML.drops[1], drops=(_DSML.open, _DSML.close))
_GLM_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_MINIMAX = CallMarks(
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
_QWEN_CODER = CallMarks(
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
_MINICPM5 = CallMarks(
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
_SEED = replace(_QWEN_CODER, open="<seed:tool_call>", close="</seed:tool_call>")

_SOLAR_OPEN, _SOLAR_CLOSE = "<|tool_calls|>", "<|calls|>"
_SOLAR_CALL, _SOLAR_END = "<|tool_call:begin|>", "<|tool_call:end|>"
_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_MESSAGE, SOLAR_CONTENT, SOLAR_END = "<|begin|>assistant", "<|content|>", "<|end|>"
SOLAR_HEADS = (_SOLAR_MESSAGE + SOLAR_CONTENT, _SOLAR_MESSAGE, SOLAR_CONTENT)
_TOOLCALL_OPEN, _TOOLCALL_CLOSE = "<TOOLCALL>", "</TOOLCALL>"

_GEMMA_OPEN, _GEMMA_CLOSE, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_DROPS = ("<|channel>thought\n<channel|>", "<channel|>", "<|tool_response>")
_PYTHON_END = "<|python_end|>"
_LFM2_OPEN, _LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO_OPEN, _OLMO_CLOSE = "<function_calls>", "</function_calls>"


def _dsml_calls(marks: CallMarks) -> ForcedForm:
    return ForcedForm(
        begin=f"{marks.open}\n",
        call=f'{marks.call}"NAME">\nARGUMENTS{marks.call_end}\n',
        end=marks.close,
        arguments=MarkedArguments(argument=f'{marks.key}"KEY" string="IS_TEXT">VALUE{marks.value_end}\n'),
    )


def _hy3(version: str, *others: CallMarks) -> CallMarks:
    """The marks of a version of Hy3: each of them ends in the version's name."""
    return CallMarks(
        open=f"<tool_calls{version}>",
        close=f"</tool_calls{version}>",
        call=f"<tool_call{version}>",
        call_end=f"</tool_call{version}>",
        behind_name=f"<tool_sep{version}>",
        name_ends=(f"<arg_key{version}>", f"</tool_call{version}>"),
        key=f"<arg_key{version}>",
        key_end=f"</arg_key{version}>",
        value=f"<arg_value{version}>",
        value_end=f"</arg_value{version}>",
        bare=True,
        others=others,
    )


def _hy3_calls(marks: CallMarks, *others: ForcedForm) -> ForcedForm:
    argument = f"{marks.key}KEY{marks.key_end}\n{marks.value}VALUE{marks.value_end}\n"
    return ForcedForm(
        begin=f"{marks.open}\n",
        call=f"{marks.call}NAME{marks.behind_name}\nARGUMENTS{marks.call_end}\n",
        end=marks.close,
        arguments=MarkedArguments(argument=argument),
        others=others,
    )


_HY3_BARE = _hy3("")
_HY3 = _hy3(":opensource", _HY3_BARE)


def _coder_calls(marks: CallMarks) -> ForcedForm:
    """The form of Qwen3-Coder, one block for each call, between the marks of ``marks``."""
    return ForcedForm(
        begin=marks.open,
        call="\n<function=NAME>\nARGUMENTS</function>\n",
        between=f"{marks.close}\n{marks.open}",
        end=marks.close,
        arguments=MarkedArguments(argument="<parameter=KEY>\nVALUE\n</parameter>\n"),
    )


def _kimi_ids(tools: ToolRequest) -> Callable[[str], str]:
    """The ids of one answer's calls, which go on behind those of the conversation."""
    numbers = count(tools.num_earlier_calls)
    return lambda name: _KIMI_ID.format(name=name, number=next(numbers))


def _solar_id(name: str) -> str:
    """Ten letters and digits, as the model writes them."""
    return uuid.uuid4().hex[:10]


def _mistral_id(name: str) -> str:
    """Nine letters and digits: the models' chat templates refuse other ids."""
    return uuid.uuid4().hex[:9]


# The name that --tool-call-parser takes -> the format; of several that fit a chat template, the first one counts.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES.format(
        "Qwen, Hermes, EXAONE 4, Granite 4",
        aliases=("qwen", "qwen25", "qwen3_json", "granite4"),
        template=(TemplateMarks(("<tool_call>",), lacks=_LIKE_HERMES),),
        forced=_HERMES_FORM,
    ),
    "llama3_json": ToolFormat(
        models="Llama 3",
        aliases=("llama3", "llama4_json"),
        marks=(PYTHON_TAG,),
        opens=(PYTHON_TAG,),
        template=(TemplateMarks(("dictionary of argument name and its value",)),),
        forced=ForcedForm(call='{"name": "NAME", "parameters": ARGUMENTS}', between="; "),
        new_parser=lambda tools: Llama3JsonToolParser(tools.names),
    ),
    "openai": harmony.FORMAT,
    "glm45": CallMarks(
        open="<tool_call>",
        close="</tool_call>",
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        value_breaks=("</tool_call>",),
    ).format(
        "GLM-4.5 to 5",
        aliases=("glm47", "glm"),
        template=(TemplateMarks(("<tool_call>", "<arg_key>", "[gMASK]")),),
        forced=ForcedForm(
            call="<tool_call>NAME\nARGUMENTS</tool_call>",
            between="\n",
            arguments=MarkedArguments(argument=_GLM_ARGUMENT),
            others=(  # GLM-4.7
                ForcedForm(
                    call="<tool_call>NAMEARGUMENTS</tool_call>",
                    arguments=MarkedArguments(argument=_GLM_ARGUMENT.replace("\n", "")),
                ),
            ),
        ),
    ),
    "minimax_m2": _MINIMAX.format(
        "MiniMax-M2",
        aliases=("minimax-m2",),
        template=(TemplateMarks((_MINIMAX.open,), lacks=("]<]minimax[>[",)),),
        forced=ForcedForm(
            begin=f"{_MINIMAX.open}\n",
            call='<invoke name="NAME">\nARGUMENTS</invoke>\n',
            end=_MINIMAX.close,
            arguments=MarkedArguments(argument='<parameter name="KEY">VALUE</parameter>\n'),
        ),
    ),
    "qwen3_coder": _QWEN_CODER.format(
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        aliases=("qwen3_xml", "step3p5", "nanbeige"),
        template=(TemplateMarks(("<tool_call>", "<function=", "<parameter="), lacks=(_SEED.open,)),),
        forced=_coder_calls(_QWEN_CODER),
    ),
    "ernie45": ToolFormat(
        models="ERNIE 4.5",
        marks=("<tool_call>", "</tool_call>", RESPONSE),
        opens=_HERMES.opens,
        template=(
            TemplateMarks(
                ("<tool_call>", RESPONSE), lacks=("<|tool_call|>", "<minimax:tool_call>", "]<]minimax[>[", "[gMASK]")
            ),
        ),
        forced=_HERMES_FORM,
        new_parser=lambda tools: Ernie45ToolParser(_HERMES),
    ),
    "mistral": CallBlock(
        opens=("[TOOL_CALLS]",),
        is_closed=False,
        head=re.compile(r"\s*([^\s\[\]{}<>\"',]+)\s*(?:\[CALL_ID\].*)?", re.DOTALL),
        arguments="[ARGS]",  # may be missing
        in_head=("[CALL_ID]",),
    ).format(
        "Mistral",
        call_ids=lambda tools: _mistral_id,
        template=(TemplateMarks(("[TOOL_CALLS]",)),),
        forced=ForcedForm(
            call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
            others=(
                ForcedForm(call="[TOOL_CALLS]NAME[CALL_ID]IDENTIFIER[ARGS]ARGUMENTS"),
                _MISTRAL_LIST,
                replace(_MISTRAL_LIST, begin="[TOOL_CALLS] ["),  # the first tokenizers put a space behind a mark
            ),
        ),
    ),
    "granite": _GRANITE.format(
        "Granite 3",
        template=(TemplateMarks(("<|tool_call|>",), lacks=("<|/tool|>",)),),
        forced=ForcedForm(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]"),
    ),
    "deepseek_v3": _DEEPSEEK.format(
        "DeepSeek V3, R1",
        aliases=("deepseekv3",),
        template=(TemplateMarks((_DEEPSEEK_OPEN, f"{_FENCE}json")),),
        forced=ForcedForm(
            begin=_DEEPSEEK_OPEN,
            call=f"{_DEEPSEEK_CALL}function{_SEPARATOR}NAME\n{_FENCE}json\nARGUMENTS\n{_FENCE}{_DEEPSEEK_END}",
            between="\n",
            end=_DEEPSEEK_CLOSE,
        ),
    ),
    "deepseek_v31": _DEEPSEEK.format(
        "DeepSeek V3.1",
        aliases=("deepseekv31",),
        template=(TemplateMarks((_DEEPSEEK_OPEN,), lacks=(f"{_FENCE}json",)),),
        forced=ForcedForm(
            begin=_DEEPSEEK_OPEN,
            call=f"{_DEEPSEEK_CALL}NAME{_SEPARATOR}ARGUMENTS{_DEEPSEEK_END}",
            end=_DEEPSEEK_CLOSE,
        ),
    ),
    "deepseek_v32": _DSML.format(
        "DeepSeek V3.2",
        aliases=("deepseekv32",),
        template=(TemplateMarks(("DSML", "function_calls")),),
        forced=_dsml_calls(_DSML),
    ),
    "deepseek_v4": _DSML_V4.format(
        "DeepSeek V4",
        aliases=("deepseekv4",),
        template=(TemplateMarks(("DSML", "tool_calls"), lacks=("function_calls",)),),
        forced=_dsml_calls(_DSML_V4),
    ),
    "kimi_k2": CallBlock(
        opens=(_KIMI_OPEN, _KIMI_CALL),
        close=_KIMI_CLOSE,
        is_closed=False,
        between=(_KIMI_END,),
        head=re.compile(r"\s*(?:functions\.)?([^\s<>{}\"',:]+):\d+\s*"),
        arguments=_KIMI_ARGUMENTS,
        drops=(_KIMI_CLOSE, _KIMI_END),
    ).format(
        "Kimi K2",
        call_ids=_kimi_ids,
        numbered_id=_KIMI_ID,
        template=(TemplateMarks((_KIMI_OPEN,)),),
        forced=ForcedForm(
            begin=_KIMI_OPEN,
            call=f"{_KIMI_CALL}functions.NAME:NUMBER{_KIMI_ARGUMENTS}ARGUMENTS{_KIMI_END}",
            end=_KIMI_CLOSE,
        ),
    ),
    "gemma4": LiteralMarks(
        opens=(_GEMMA_OPEN,),
        close=_GEMMA_CLOSE,
        head=re.compile(r"(?:call)?\s*:?\s*([^\W\d][\w.\-]*)\s*[{(]"),
        language=Language(quotes=(_GEMMA_QUOTE,), escapes=False, equals=":", bare_texts=True),
        drops=GEMMA_DROPS,
    ).format(
        "Gemma 4",
        template=(TemplateMarks((_GEMMA_OPEN,)),),
        forced=ForcedForm(
            begin=_GEMMA_OPEN,
            call="call:NAME{ARGUMENTS}",
            between=f"{_GEMMA_CLOSE}{_GEMMA_OPEN}",
            end=_GEMMA_CLOSE,
            arguments=LiteralArguments(equals=":", between=",", quote=_GEMMA_QUOTE),
        ),
    ),
    "seed_oss": _SEED.format("Seed-OSS", template=(TemplateMarks((_SEED.open,)),), forced=_coder_calls(_SEED)),
    "cohere_command3": CallBlock(
        opens=(_COHERE_OPEN,), close=_COHERE_CLOSE, drops=(*COHERE_RESPONSE, _COHERE_CLOSE)
    ).format(
        "Command R7B, Command A",
        template=(TemplateMarks((_COHERE_OPEN, COHERE_RESPONSE[0])),),
        forced=ForcedForm(
            begin=f"{_COHERE_OPEN}[\n    ",
            call='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}',
            between=",\n    ",
            end=f"\n]{_COHERE_CLOSE}",
        ),
    ),
    "phi4_mini_json": CallBlock(opens=(_FUNCTOOLS, "<|tool_call|>"), close="<|/tool_call|>", is_closed=False).format(
        "Phi-4-mini",
        template=(TemplateMarks(("<|/tool|>",)), TemplateMarks((_FUNCTOOLS,))),
        forced=ForcedForm(begin=_FUNCTOOLS, call=_OBJECT, between=", ", end="]"),
    ),
    "pythonic": LiteralMarks(opens=("<|python_start|>",), close=_PYTHON_END, bare=True, drops=(_PYTHON_END,)).format(
        "Llama 3.2, Llama 4",
        aliases=("llama4_pythonic",),
        template=(TemplateMarks(("[func_name1(",)),),
        forced=ForcedForm(begin="[", call=_PYTHON_CALL, between=", ", end="]", arguments=_PYTHON_ARGUMENTS),
    ),
    "olmo3": LiteralMarks(opens=(_OLMO_OPEN,), close=_OLMO_CLOSE).format(
        "OLMo 3",
        template=(
            TemplateMarks((_OLMO_OPEN,), lacks=("DSML",)),
            TemplateMarks(("<functions>", "function_calls"), lacks=("DSML",)),
        ),
        forced=ForcedForm(
            begin=_OLMO_OPEN, call=_PYTHON_CALL, between="\n", end=_OLMO_CLOSE, arguments=_PYTHON_ARGUMENTS
        ),
    ),
    "lfm2": LiteralMarks(opens=(_LFM2_OPEN,), close=_LFM2_CLOSE, echoes=True, drops=(_LFM2_CLOSE,)).format(
        "LFM2",
        template=(TemplateMarks(("<|tool_list_start|>",)), TemplateMarks(("List of tools: [",))),
        forced=ForcedForm(
            begin=f"{_LFM2_OPEN}[", call=_PYTHON_CALL, between=", ", end=f"]{_LFM2_CLOSE}", arguments=_PYTHON_ARGUMENTS
        ),
    ),
    "hy_v3": _HY3.format(
        "Hy3",
        aliases=("hunyuan_v3",),
        template=(TemplateMarks(("<tool_sep", "<arg_key")),),
        forced=_hy3_calls(_HY3, _hy3_calls(_HY3_BARE)),
    ),
    "solar_open": CallBlock(
        opens=(_SOLAR_OPEN, _SOLAR_CALL),
        close=_SOLAR_CLOSE,
        is_closed=False,
        between=(_SOLAR_END,),
        head=re.compile(rf"\s*[^\s<>]*\s*{re.escape(_SOLAR_NAME)}\s*([^\s<>{{}}\"',]+)\s*"),
        arguments=_SOLAR_ARGUMENTS,
        in_head=(_SOLAR_NAME,),
        drops=(_SOLAR_CLOSE, _SOLAR_END, *SOLAR_HEADS, SOLAR_END),
    ).format(
        "Solar Open",
        call_ids=lambda tools: _solar_id,
        template=(TemplateMarks((_SOLAR_CALL,)),),
        forced=ForcedForm(
            begin=_SOLAR_OPEN, call=f"{_SOLAR_CALL}TENCHARS{_SOLAR_NAME}NAME{_SOLAR_ARGUMENTS}ARGUMENTS{_SOLAR_END}"
        ),
    ),
    "minicpm5": _MINICPM5.format(
        "MiniCPM5",
        template=(TemplateMarks(("<function name=", "<param name=")),),
        forced=ForcedForm(
            call='<function name="NAME">ARGUMENTS</function>',
            between="\n",
            arguments=MarkedArguments(argument='<param name="KEY">VALUE</param>'),
        ),
    ),
    "nemotron_v2": CallBlock(opens=(_TOOLCALL_OPEN,), close=_TOOLCALL_CLOSE).format(
        "Nemotron Nano v2",
        aliases=("nemotron_json", "llama_nemotron_json"),
        template=(TemplateMarks((_TOOLCALL_OPEN,)),),
        forced=ForcedForm(begin=f"{_TOOLCALL_OPEN}[", call=_OBJECT, between=", ", end=f"]{_TOOLCALL_CLOSE}"),
    ),
}
