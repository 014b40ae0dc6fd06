"""Tool calls of Hy3, whose every mark ends in the name of a version: ``<tool_call:opensource>``.

The tokenizer reveals the version, since the marks are separate tokens.  Marks without one are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from tp_engine.api.openai.tools.forced_arguments import MarkedArguments
from tp_engine.api.openai.tools.marked_calls import CallMarks
from tp_engine.api.openai.tools.tool_format import ForcedForm, TemplateMarks, ToolFormat

_PUBLISHED = ":opensource"
_VERSION = re.compile(r"<tool_sep(:[^<>\s]+)?>")


def version_of(tokens: Iterable[str]) -> str:
    """The ending of the marks among a tokenizer's tokens; that of the published models if there are none."""
    found = {match[1] or "" for token in tokens if (match := _VERSION.fullmatch(token))}
    return max(found, key=lambda version: (version == _PUBLISHED, version), default=_PUBLISHED)


def tool_format(tokens: Iterable[str] = ()) -> ToolFormat:
    """The format of a tokenizer's version."""
    return _of_version(version_of(tokens))


@cache
def _of_version(version: str) -> ToolFormat:
    others = () if not version else (_marks(""),)
    marks = _marks(version, *others)
    return marks.format(
        "Hy3",
        aliases=("hunyuan_v3",),
        template=(TemplateMarks(("<tool_sep", "<arg_key")),),
        forced=_calls(marks, *map(_calls, others)),
        of_tokens=tool_format,
    )


def _marks(version: str, *others: CallMarks) -> CallMarks:
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


def _calls(marks: CallMarks, *others: ForcedForm) -> ForcedForm:
    argument = f"{marks.key}KEY{marks.key_end}\n{marks.value}VALUE{marks.value_end}\n"
    return ForcedForm(
        begin=f"{marks.open}\n",
        call=f"{marks.call}NAME{marks.behind_name}\nARGUMENTS{marks.call_end}\n",
        end=marks.close,
        arguments=MarkedArguments(argument=argument),
        others=others,
    )
