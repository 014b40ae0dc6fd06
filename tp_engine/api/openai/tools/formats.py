"""The formats of tool calls: for each the marks that its reader finds, and how its models write forced calls.

Most are rows of marks for one of three readers; ``json_calls.py`` reads JSON objects after a mark, ``marked_calls.py``
arguments between marks, and ``literal_calls.py`` calls as in a program.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools import harmony, hy3, marks
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
_PYTHON_CALL = "NAME(ARGUMENTS)"
_PYTHON_ARGUMENTS = LiteralArguments(equals="=", between=", ")
_HERMES_FORM = ForcedForm(
    call=f"<tool_call>\n{_OBJECT}\n</tool_call>",
    between="\n",
    others=(ForcedForm(call=f"<tool_call>{_OBJECT}</tool_call>", between="\n"),),  # EXAONE 4
)
_MISTRAL_LIST = ForcedForm(begin="[TOOL_CALLS][", call=_OBJECT, between=", ", end="]")
_GLM_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"


def _dsml_calls(of: CallMarks) -> ForcedForm:
    return ForcedForm(
        begin=f"{of.open}\n",
        call=f'{of.call}"NAME">\nARGUMENTS{of.call_end}\n',
        end=of.close,
        arguments=MarkedArguments(argument=f'{of.key}"KEY" string="IS_TEXT">VALUE{of.value_end}\n'),
    )


def _coder_calls(of: CallMarks) -> ForcedForm:
    """The form of Qwen3-Coder, one block for each call, between its marks."""
    return ForcedForm(
        begin=of.open,
        call="\n<function=NAME>\nARGUMENTS</function>\n",
        between=f"{of.close}\n{of.open}",
        end=of.close,
        arguments=MarkedArguments(argument="<parameter=KEY>\nVALUE\n</parameter>\n"),
    )


def _kimi_ids(tools: ToolRequest) -> Callable[[str], str]:
    """The ids of one answer's calls, numbered after those of the conversation."""
    numbers = count(tools.num_earlier_calls)
    return lambda name: marks.KIMI_ID.format(name=name, number=next(numbers))


def _solar_id(name: str) -> str:
    """Ten letters and digits, as the model writes them."""
    return uuid.uuid4().hex[:10]


def _mistral_id(name: str) -> str:
    """Nine letters and digits: the models' chat templates refuse other ids."""
    return uuid.uuid4().hex[:9]


# The name that --tool-call-parser takes -> the format; of several that fit a chat template, the first one counts.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": marks.HERMES.format(
        "Qwen, Hermes, EXAONE 4, Granite 4",
        aliases=("qwen", "qwen25", "qwen3_json", "granite4"),
        template=(TemplateMarks(("<tool_call>",), lacks=marks.LIKE_HERMES),),
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
        "GLM-4.5 to 5, Laguna",
        aliases=("glm47", "glm", "poolside_v1"),
        template=(
            TemplateMarks(("<tool_call>", "<arg_key>", "[gMASK]")),
            TemplateMarks(("<tool_call>", "<arg_key>", "</assistant>")),
        ),
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
    "minimax_m2": marks.MINIMAX.format(
        "MiniMax-M2",
        aliases=("minimax-m2",),
        template=(TemplateMarks((marks.MINIMAX.open,), lacks=("]<]minimax[>[",)),),
        forced=ForcedForm(
            begin=f"{marks.MINIMAX.open}\n",
            call='<invoke name="NAME">\nARGUMENTS</invoke>\n',
            end=marks.MINIMAX.close,
            arguments=MarkedArguments(argument='<parameter name="KEY">VALUE</parameter>\n'),
        ),
    ),
    "qwen3_coder": marks.QWEN_CODER.format(
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        aliases=("qwen3_xml", "step3p5", "nanbeige"),
        template=(TemplateMarks(("<tool_call>", "<function=", "<parameter="), lacks=(marks.SEED.open,)),),
        forced=_coder_calls(marks.QWEN_CODER),
    ),
    "ernie45": ToolFormat(
        models="ERNIE 4.5",
        marks=("<tool_call>", "</tool_call>", RESPONSE),
        opens=marks.HERMES.opens,
        template=(
            TemplateMarks(
                ("<tool_call>", RESPONSE), lacks=("<|tool_call|>", "<minimax:tool_call>", "]<]minimax[>[", "[gMASK]")
            ),
        ),
        forced=_HERMES_FORM,
        new_parser=lambda tools: Ernie45ToolParser(marks.HERMES),
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
                replace(_MISTRAL_LIST, begin="[TOOL_CALLS] ["),  # the first tokenizers put a space after a mark
            ),
        ),
    ),
    "granite": marks.GRANITE.format(
        "Granite 3",
        template=(TemplateMarks(("<|tool_call|>",), lacks=("<|/tool|>",)),),
        forced=ForcedForm(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]"),
    ),
    "deepseek_v3": marks.DEEPSEEK.format(
        "DeepSeek V3, R1",
        aliases=("deepseekv3",),
        template=(TemplateMarks((marks.DEEPSEEK_OPEN, f"{marks.FENCE}json")),),
        forced=ForcedForm(
            begin=marks.DEEPSEEK_OPEN,
            call=f"{marks.DEEPSEEK_CALL}function{marks.SEPARATOR}NAME\n{marks.FENCE}json\nARGUMENTS\n{marks.FENCE}{marks.DEEPSEEK_END}",
            between="\n",
            end=marks.DEEPSEEK_CLOSE,
        ),
    ),
    "deepseek_v31": marks.DEEPSEEK.format(
        "DeepSeek V3.1",
        aliases=("deepseekv31",),
        template=(TemplateMarks((marks.DEEPSEEK_OPEN,), lacks=(f"{marks.FENCE}json",)),),
        forced=ForcedForm(
            begin=marks.DEEPSEEK_OPEN,
            call=f"{marks.DEEPSEEK_CALL}NAME{marks.SEPARATOR}ARGUMENTS{marks.DEEPSEEK_END}",
            end=marks.DEEPSEEK_CLOSE,
        ),
    ),
    "deepseek_v32": marks.DSML.format(
        "DeepSeek V3.2",
        aliases=("deepseekv32",),
        template=(TemplateMarks(("DSML", "function_calls")),),
        forced=_dsml_calls(marks.DSML),
    ),
    "deepseek_v4": marks.DSML_V4.format(
        "DeepSeek V4",
        aliases=("deepseekv4",),
        template=(TemplateMarks(("DSML", "tool_calls"), lacks=("function_calls",)),),
        forced=_dsml_calls(marks.DSML_V4),
    ),
    "kimi_k2": CallBlock(
        opens=(marks.KIMI_OPEN, marks.KIMI_CALL),
        close=marks.KIMI_CLOSE,
        is_closed=False,
        between=(marks.KIMI_END,),
        head=re.compile(r"\s*(?:functions\.)?([^\s<>{}\"',:]+):\d+\s*"),
        arguments=marks.KIMI_ARGUMENTS,
        drops=(marks.KIMI_CLOSE, marks.KIMI_END),
    ).format(
        "Kimi K2",
        call_ids=_kimi_ids,
        numbered_id=marks.KIMI_ID,
        template=(TemplateMarks((marks.KIMI_OPEN,)),),
        forced=ForcedForm(
            begin=marks.KIMI_OPEN,
            call=f"{marks.KIMI_CALL}functions.NAME:NUMBER{marks.KIMI_ARGUMENTS}ARGUMENTS{marks.KIMI_END}",
            end=marks.KIMI_CLOSE,
        ),
    ),
    "gemma4": LiteralMarks(
        opens=(marks.GEMMA_OPEN,),
        close=marks.GEMMA_CLOSE,
        head=re.compile(r"(?:call)?\s*:?\s*([^\W\d][\w.\-]*)\s*[{(]"),
        language=Language(quotes=(marks.GEMMA_QUOTE,), escapes=False, equals=":", bare_texts=True),
        drops=marks.GEMMA_DROPS,
    ).format(
        "Gemma 4",
        template=(TemplateMarks((marks.GEMMA_OPEN,)),),
        forced=ForcedForm(
            begin=marks.GEMMA_OPEN,
            call="call:NAME{ARGUMENTS}",
            between=f"{marks.GEMMA_CLOSE}{marks.GEMMA_OPEN}",
            end=marks.GEMMA_CLOSE,
            arguments=LiteralArguments(equals=":", between=",", quote=marks.GEMMA_QUOTE),
        ),
    ),
    "seed_oss": marks.SEED.format(
        "Seed-OSS", template=(TemplateMarks((marks.SEED.open,)),), forced=_coder_calls(marks.SEED)
    ),
    "cohere_command3": CallBlock(
        opens=(marks.COHERE_OPEN,), close=marks.COHERE_CLOSE, drops=(*marks.COHERE_RESPONSE, marks.COHERE_CLOSE)
    ).format(
        "Command R7B, Command A",
        template=(TemplateMarks((marks.COHERE_OPEN, marks.COHERE_RESPONSE[0])),),
        forced=ForcedForm(
            begin=f"{marks.COHERE_OPEN}[\n    ",
            call='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}',
            between=",\n    ",
            end=f"\n]{marks.COHERE_CLOSE}",
        ),
    ),
    "phi4_mini_json": CallBlock(
        opens=(marks.FUNCTOOLS, "<|tool_call|>"), close="<|/tool_call|>", is_closed=False
    ).format(
        "Phi-4-mini",
        template=(TemplateMarks(("<|/tool|>",)), TemplateMarks((marks.FUNCTOOLS,))),
        forced=ForcedForm(begin=marks.FUNCTOOLS, call=_OBJECT, between=", ", end="]"),
    ),
    "pythonic": LiteralMarks(
        opens=("<|python_start|>",), close=marks.PYTHON_END, bare=True, drops=(marks.PYTHON_END,)
    ).format(
        "Llama 3.2, Llama 4",
        aliases=("llama4_pythonic",),
        template=(TemplateMarks(("[func_name1(",)),),
        forced=ForcedForm(begin="[", call=_PYTHON_CALL, between=", ", end="]", arguments=_PYTHON_ARGUMENTS),
    ),
    "olmo3": LiteralMarks(opens=(marks.OLMO_OPEN,), close=marks.OLMO_CLOSE).format(
        "OLMo 3",
        template=(
            TemplateMarks((marks.OLMO_OPEN,), lacks=("DSML",)),
            TemplateMarks(("<functions>", "function_calls"), lacks=("DSML",)),
        ),
        forced=ForcedForm(
            begin=marks.OLMO_OPEN, call=_PYTHON_CALL, between="\n", end=marks.OLMO_CLOSE, arguments=_PYTHON_ARGUMENTS
        ),
    ),
    "lfm2": LiteralMarks(
        opens=(marks.LFM2_OPEN,), close=marks.LFM2_CLOSE, echoes=True, drops=(marks.LFM2_CLOSE,)
    ).format(
        "LFM2",
        template=(TemplateMarks(("<|tool_list_start|>",)), TemplateMarks(("List of tools: [",))),
        forced=ForcedForm(
            begin=f"{marks.LFM2_OPEN}[",
            call=_PYTHON_CALL,
            between=", ",
            end=f"]{marks.LFM2_CLOSE}",
            arguments=_PYTHON_ARGUMENTS,
        ),
    ),
    "hy_v3": hy3.tool_format(),
    "solar_open": CallBlock(
        opens=(marks.SOLAR_OPEN, marks.SOLAR_CALL),
        close=marks.SOLAR_CLOSE,
        is_closed=False,
        between=(marks.SOLAR_CALL_END,),
        head=re.compile(rf"\s*[^\s<>]*\s*{re.escape(marks.SOLAR_NAME)}\s*([^\s<>{{}}\"',]+)\s*"),
        arguments=marks.SOLAR_ARGUMENTS,
        in_head=(marks.SOLAR_NAME,),
        drops=(marks.SOLAR_CLOSE, marks.SOLAR_CALL_END, *marks.SOLAR_HEADS, marks.SOLAR_END),
    ).format(
        "Solar Open",
        call_ids=lambda tools: _solar_id,
        template=(TemplateMarks((marks.SOLAR_CALL,)),),
        forced=ForcedForm(
            begin=marks.SOLAR_OPEN,
            call=f"{marks.SOLAR_CALL}TENCHARS{marks.SOLAR_NAME}NAME{marks.SOLAR_ARGUMENTS}ARGUMENTS{marks.SOLAR_CALL_END}",
        ),
    ),
    "minicpm5": marks.MINICPM5.format(
        "MiniCPM5",
        template=(TemplateMarks(("<function name=", "<param name=")),),
        forced=ForcedForm(
            call='<function name="NAME">ARGUMENTS</function>',
            between="\n",
            arguments=MarkedArguments(argument='<param name="KEY">VALUE</param>'),
        ),
    ),
    "nemotron_v2": CallBlock(opens=(marks.TOOLCALL_OPEN,), close=marks.TOOLCALL_CLOSE).format(
        "Nemotron Nano v2",
        aliases=("nemotron_json", "llama_nemotron_json"),
        template=(TemplateMarks((marks.TOOLCALL_OPEN,)),),
        forced=ForcedForm(begin=f"{marks.TOOLCALL_OPEN}[", call=_OBJECT, between=", ", end=f"]{marks.TOOLCALL_CLOSE}"),
    ),
}
