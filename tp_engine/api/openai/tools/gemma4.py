"""Tool calls as Gemma 4 models write them; keys and words are bare, strings have quotes of their own.

::

    <|tool_call>call:NAME{key:<|"|>text<|"|>,n:42,o:{x:[1,true]}}<tool_call|>
"""

import re

from tp_engine.api.openai.tools.events import ForcedForm, TemplateMarks
from tp_engine.api.openai.tools.forced_arguments import LiteralArguments
from tp_engine.api.openai.tools.literal_calls import LiteralMarks
from tp_engine.api.openai.tools.literals import Language

OPEN, QUOTE = "<|tool_call>", '<|"|>'
MARKS = LiteralMarks(
    opens=(OPEN,),
    close="<tool_call|>",
    head=re.compile(r"(?:call)?\s*:?\s*([^\W\d][\w.\-]*)\s*[{(]"),
    language=Language(quotes=(QUOTE,), escapes=False, equals=":", bare_texts=True),
    drops=("<|channel>thought\n<channel|>", "<channel|>", "<|tool_response>"),
)
FORMAT = MARKS.format(
    "Gemma 4",
    template=(TemplateMarks((OPEN,)),),
    forced=ForcedForm(
        begin=OPEN,
        call="call:NAME{ARGUMENTS}",
        between=f"{MARKS.close}{OPEN}",
        end=MARKS.close,
        arguments=LiteralArguments(equals=":", between=",", quote=QUOTE),
    ),
)
