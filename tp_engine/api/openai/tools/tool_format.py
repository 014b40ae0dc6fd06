"""The description of a format of tool calls or of whole messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tp_engine.api.openai.tools.events import NewCallId, openai_call_id
from tp_engine.api.openai.tools.forced_arguments import JSON, ArgumentForm
from tp_engine.api.openai.tools.text_parser import MessageParser, TextParser

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest  # imports pydantic, which reading options does not need
    from tp_engine.api.openai.tools.token_writing import TokenWriting
    from tp_engine.requests.structured_outputs import StructuredOutputsParams

# Names of functions that every format's reader takes.
_NAME = re.compile(r"[^\W\d][\w.\-]*")
# From the tools of a request to the ids of one answer's calls.
CallIds: TypeAlias = "Callable[[ToolRequest], NewCallId]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How some models write whole messages, where reasoning, content and calls cannot be separated one by one.

    ``new_parser`` takes the tools, None if calls are not wanted, and the prompt, which may have begun the message.
    ``preamble`` is what comes before an answer that must follow a grammar (``StructuredOutputsParams.preamble``), with
    or without reasoning, and with or without calls in its place; ``forced_calls`` is the grammar, in Lark, of a text
    with a call that the request forces, and white space as in a constraint.  Those of ``marks`` that are in ``stops``
    end the model's turn.
    """

    marks: tuple[str, ...]
    stops: tuple[str, ...]
    new_parser: Callable[[ToolRequest | None, str], MessageParser]
    preamble: Callable[[TokenWriting, bool, bool], str]
    forced_calls: Callable[[ToolRequest, TokenWriting, bool, StructuredOutputsParams], str]


@dataclass(frozen=True, slots=True)
class TemplateMarks:
    """Signs that a chat template belongs to a format: its source has all of ``has``, and none of ``lacks``."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fit(self, source: str) -> bool:
        """Whether ``source`` is such a template."""
        return all(mark in source for mark in self.has) and not any(mark in source for mark in self.lacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedForm:
    """How a model writes calls that are forced: ``begin``, calls with ``between`` between them, ``end``.

    ``call`` contains the words NAME, ARGUMENTS, NUMBER for any number, IDENTIFIER for nine letters and digits, and
    TENCHARS for ten small ones;
    ``arguments`` tells how arguments are written.  ``others`` are forms of other versions of the models: the grammar
    takes each, so that the model decides.
    """

    begin: str = ""
    call: str
    between: str = ""
    end: str = ""
    arguments: ArgumentForm = JSON
    others: tuple[ForcedForm, ...] = ()

    @property
    def versions(self) -> tuple[ForcedForm, ...]:
        """This form, which history is written in, and the others."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How some models write tool calls; each format is a row of ``TOOL_FORMATS``.

    ``models`` names them in ``--help``; ``aliases`` are other names of vLLM and SGLang for the format.  Texts show
    ``marks`` also where the tokenizer calls them special tokens.  One of ``opens`` begins a call, also inside of
    reasoning, which the call ends.  ``call_ids`` makes the ids of one answer's calls; ``numbered_id`` is the only form
    of ids that the model knows (with ``{name}`` and ``{number}``, which counts the calls of a conversation from 0), so
    that the template gets every id in it.  A chat template that one of ``template`` fits is of such a model.
    ``forced`` is the form of calls that a request forces, unless it cannot keep a tool's schema; then they are JSON
    without marks.  ``message``: the calls, forced ones too, are part of a format of whole messages.  ``of_tokens``
    makes the format of the version that a tokenizer's own tokens tell.
    """

    models: str
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...]
    opens: tuple[str, ...] = ()
    new_parser: Callable[[ToolRequest], TextParser]
    call_ids: CallIds = lambda tools: openai_call_id
    numbered_id: str = ""
    template: tuple[TemplateMarks, ...] = ()
    forced: ForcedForm | None = None
    message: MessageFormat | None = None
    of_tokens: Callable[[Iterable[str]], ToolFormat] | None = None

    def for_tokens(self, tokens: Iterable[str]) -> ToolFormat:
        """This format, as a model writes it whose tokenizer has these tokens in angle brackets."""
        return self if self.of_tokens is None else self.of_tokens(tokens)

    def forced_form(self, tools: ToolRequest) -> ForcedForm | None:
        """The form of the calls that ``tools`` force; None: JSON without marks."""
        if self.forced is None or tools.choice == "auto":
            return None
        ways = {version.arguments for version in self.forced.versions}
        fit = (_NAME.fullmatch(name) and all(way.fits(one) for way in ways) for name, one in tools.argument_schemas())
        return self.forced if all(fit) else None

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, pairs of a name and its arguments, as the model writes them; empty if that is not known."""
        form = self.forced
        if form is None:
            return ""
        texts = []
        for number, (name, arguments) in enumerate(calls):
            numbered = form.call.replace("NUMBER", str(number)).replace("TENCHARS", f"{number:010}")
            before, _, behind = numbered.partition("ARGUMENTS")
            called = before.replace("NAME", json.dumps(name, ensure_ascii=False)[1:-1] if '"NAME"' in before else name)
            texts.append(f"{called}{form.arguments.written(arguments)}{behind}")
        return f"{form.begin}{form.between.join(texts)}{form.end}"
