"""What one chat template takes, found out once by rendering short conversations with a sentinel in one place.

| question | answered by |
| --- | --- |
| content of a role as text | the sentinel as text: the template shows it |
| content of a role as parts | the sentinel as one part: the same prompt as for text; and two parts: both show |
| role developer | its sentinel shows where the template has the word, or that of the system does not show either |
| arguments of calls as an object | the sentinel in an object: the template shows it, and no Python object |
| null beside calls | calls that show beside null only |
| system messages after the first, two messages of a role | they show where the conversation without them does |
| one call in a message only | two in a row show, with their answers, and two in a message do not |
| answers right after their calls | another message between them hides one, or is refused |
| answers without calls | they show |
| ids of nine letters and digits | the template refuses other ids |
| thinking, effort | the values of a variable make different prompts (`thinking_form.py`) |

Contents are probed in several places, since templates treat the first message, the last one and those beside tools or
calls differently; places where neither form shows do not count.  A template that needs parts (it shows nothing of a
text, or refuses it) gets texts as a part.  One that shows the first part only, or takes parts in some places only, gets
parts as one text.  Tools' answers are always text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tp_engine.api.openai.chat.template import ChatTemplate, TemplateRefusal
from tp_engine.api.openai.chat.thinking_form import ThinkingForm
from tp_engine.images.sources import ImageSource
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

MAX_PROBES_S = 5.0
_FIRST, _SECOND, _THIRD, _FOURTH, _KEY = "qzxfirst", "qzxsecond", "qzxthird", "qzxfourth", "qzxkey"
# Before a sentinel: the template has printed the list of parts itself.
_PRINTED_PART = re.compile(r"""["']text["']\s*:\s*["']$""")
_PRINTED_OBJECT = re.compile(rf"'{_KEY}'\s*:\s*'{_FIRST}'")
_ROLES = ("user", "assistant", "system", "developer")
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "a key"}}, "required": [_KEY]}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "a probe", "parameters": _PARAMETERS}}
_DAY = "2026-01-01"  # a clock would make two prompts differ
_IMAGE = {"type": "image"}
_CALL_ID, _OTHER_ID = "abcdefghi", "bcdefghij"  # Mistral's templates refuse ids of another length
_LONG_ID = "call_0123456789abcdef"

Part = dict[str, str]
Content: TypeAlias = str | list[Part]
Message: TypeAlias = dict[str, Any]
# The messages before, other fields of the message itself, and the messages after it.
_Place: TypeAlias = tuple[list[Message], Message, list[Message]]


@dataclass(frozen=True, slots=True)
class ContentForm:
    """How the contents of one role are given.  A text becomes a part only where the template needs parts."""

    takes_text: bool = True
    takes_parts: bool = False

    def content(self, given: str | Sequence[str | ImageSource]) -> Content:
        """The content for the template; ``given`` is a text, or several parts, of which images stay parts."""
        has_images = not isinstance(given, str) and any(isinstance(one, ImageSource) for one in given)
        if (self.takes_parts or has_images) and given and not isinstance(given, str):
            return [_IMAGE if isinstance(one, ImageSource) else _part(one) for one in given]
        text = given if isinstance(given, str) else "\n".join(map(str, given))
        return text if self.takes_text else [_part(text)]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are given.  ``argument_texts``: their arguments are JSON text, not an object.

    ``null_content``: a content that is null stays null beside calls, because the template shows none beside a text.
    ``are_shown``: the template shows them at all.
    """

    argument_texts: bool = False
    null_content: bool = False
    are_shown: bool = True


# What --chat-template-content-format asks for.
_FORCED = {"string": ContentForm(), "openai": ContentForm(takes_text=False, takes_parts=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """What a template takes.  ``contents`` has the form of each role; other roles have that of the user.  ``thinking``:
    the variables by which it is told to think.

    ``takes_thinking``: reasoning is called ``thinking``.  ``shows_tools``: the prompt tells of the request's tools.
    ``one_system``: it shows a system message in the first place only.  ``one_call``: it shows one call of a message
    only.  ``answers_first``: a message between a call and its answer loses one of these.  ``hides_answers``: it loses
    answers whose calls are not there.  ``short_ids``: ids of calls have nine letters and digits.  ``joins``: pairs of
    roles whose messages cannot follow each other.
    """

    contents: Mapping[str, ContentForm] = field(default_factory=dict)
    calls: CallForm = CallForm()
    knows_developer: bool = False
    takes_thinking: bool = False
    shows_tools: bool = True
    one_system: bool = False
    one_call: bool = False
    answers_first: bool = False
    hides_answers: bool = False
    short_ids: bool = False
    joins: frozenset[tuple[str, str]] = frozenset()
    thinking: ThinkingForm = field(default_factory=ThinkingForm)

    @classmethod
    def of(
        cls, template: ChatTemplate, variables: Mapping[str, Any], content_format: str = "auto"
    ) -> TemplateCapabilities:
        """Probe ``template`` with ``variables``; never raises, and takes at most ``MAX_PROBES_S`` of processor time.

        ``content_format`` is a value of ``--chat-template-content-format``.
        """
        probes = _Probes(template, variables)
        if content_format in _FORCED:
            probes.forms |= dict.fromkeys(_ROLES, _FORCED[content_format])
        else:
            for role in _ROLES:  # the user first: the other probes contain a user's message
                probes.forms[role] = probes.form(role)
        calls = probes.call_form()
        answers_first = probes.answers_first(calls)
        found = cls(
            contents=probes.forms,
            calls=calls,
            one_call=probes.one_call(calls),
            answers_first=answers_first,
            hides_answers=answers_first and probes.hides_answers(),
            short_ids=probes.short_ids(calls),
            knows_developer=template.mentions("developer")
            and (probes.shows("developer") or not probes.shows("system")),
            takes_thinking=template.mentions("message.thinking") and not template.mentions("reasoning_content"),
            shows_tools=probes.shows_tools(),
            one_system=probes.one_system(),
            joins=probes.joins(),
            thinking=ThinkingForm.of(template.mentions, probes.prompts_with),
        )
        if probes.is_late:
            logger.warning(
                "the chat template could not be probed within %g s; it gets texts where it has not shown what it takes",
                MAX_PROBES_S,
            )
        return found

    def form(self, role: str) -> ContentForm:
        """How contents of ``role`` are given."""
        return self.contents.get(role, self.contents.get("user", ContentForm()))


class _Probes:
    """Renders conversations with sentinels.  ``forms`` are those known so far."""

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        self.forms: dict[str, ContentForm] = {"tool": ContentForm()}
        self._template = template
        self._variables = {"documents": None, **variables, "add_generation_prompt": True}
        self._left_s = MAX_PROBES_S

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._left_s <= 0

    def form(self, role: str) -> ContentForm:
        """The form of ``role``'s contents: text if the template shows the sentinel in neither form."""
        takes_text, takes_parts = False, []
        for place, tools in itertools.product(self._places(role), (None, [_TOOL])):
            text, one = (self._shown(role, content, place, tools) for content in (_FIRST, [_part(_FIRST)]))
            are_printed = any(_PRINTED_PART.search(one[: found.start()]) for found in re.finditer(_FIRST, one))
            shows_text, shows_part = _FIRST in text, _FIRST in one and not are_printed
            if not shows_text and not shows_part:
                continue
            takes_text |= shows_text
            takes_part = shows_part and (one == text or not shows_text)
            two = self._shown(role, [_part(_FIRST), _part(_SECOND)], place, tools) if takes_part else ""
            takes_parts.append(_FIRST in two and _SECOND in two)
        return ContentForm(takes_text or not takes_parts, bool(takes_parts) and all(takes_parts))

    def shows(self, role: str) -> bool:
        """Whether the template shows contents of ``role`` anywhere."""
        content = self.forms[role].content(_FIRST)
        places = itertools.product(self._places(role), (None, [_TOOL]))
        return any(_FIRST in self._shown(role, content, place, tools) for place, tools in places)

    def call_form(self) -> CallForm:
        """How calls are given: an object and a text beside it, unless the template shows another form only."""
        written = f'{{"{_KEY}": "{_FIRST}"}}'
        for null_content in (False, True):
            for tools in ([_TOOL], None):
                shown = self._render(self._call({_KEY: _FIRST}, null_content), tools)
                if _FIRST in shown and not _PRINTED_OBJECT.search(shown):
                    return CallForm(False, null_content)
                if written in self._render(self._call(written, null_content), tools):
                    return CallForm(True, null_content)
        return CallForm(are_shown=self.is_late)

    def one_call(self, calls: CallForm) -> bool:
        """Whether the template takes, or shows, one call of a message only, but several in a row."""
        (first, answer), (second, other) = (
            (self._calling(calls, text, call_id), self._answer(call_id, answer))
            for text, call_id, answer in ((_FIRST, _CALL_ID, _THIRD), (_SECOND, _OTHER_ID, _FOURTH))
        )
        both = {**first, "tool_calls": first["tool_calls"] + second["tool_calls"]}
        apart = self._hides([first, answer, second, other], _FIRST, _SECOND, _THIRD, _FOURTH)
        return not apart and self._hides([both, answer, other], _FIRST, _SECOND, _THIRD, _FOURTH)

    def answers_first(self, calls: CallForm) -> bool:
        """Whether a message between a call and its answer hides one of these, or is refused."""
        calling, answer = self._calling(calls, _FIRST), self._answer(_CALL_ID, _THIRD)
        others = (self._message(role, _SECOND) for role in ("user", "assistant"))
        return not self._hides([calling, answer], _FIRST, _THIRD) and any(
            self._hides([calling, other, answer], _FIRST, _SECOND, _THIRD) for other in others
        )

    def hides_answers(self) -> bool:
        """Whether the template does not show an answer whose call is not there."""
        return self._hides([self._answer(_CALL_ID, _THIRD), self._said()], _THIRD)

    def short_ids(self, calls: CallForm) -> bool:
        """Whether the template refuses an id that is not of nine letters and digits."""
        found = (
            self._hides([self._calling(calls, _FIRST, one), self._answer(one, _THIRD)], _FIRST, _THIRD)
            for one in (_CALL_ID, _LONG_ID)
        )
        return tuple(found) == (False, True)

    def _hides(self, messages: Sequence[Message], *texts: str) -> bool:
        """Whether the prompt of a question and these messages lacks one of ``texts``."""
        shown = self._render([self._message("user", "hi"), *messages], [_TOOL])
        return not self.is_late and not all(text in shown for text in texts)

    def _calling(self, calls: CallForm, text: str, call_id: str = _CALL_ID) -> Message:
        arguments = json.dumps({_KEY: text}) if calls.argument_texts else {_KEY: text}
        content = {"content": None} if calls.null_content else {}
        return self._message("assistant", "") | content | {"tool_calls": [_call(arguments, call_id)]}

    def shows_tools(self) -> bool:
        """Whether the template tells of tools; True if it refuses the probes."""
        messages = [self._message("system", "be brief"), self._message("user", "hi")]
        probes = [(self._render(some, [_TOOL]), self._render(some, None)) for some in (messages, messages[1:])]
        return self.is_late or any(shown != plain for shown, plain in probes) or not any(shown for shown, _ in probes)

    def prompts_with(self, options: Mapping[str, Any]) -> list[str]:
        """The prompts of a question, with a system message and tools or without, for these variables."""
        question = self._message("user", "hi")
        conversations = ([question], None), ([self._message("system", "be brief"), question], [_TOOL])
        return [self._render(messages, tools, options) for messages, tools in conversations]

    def one_system(self) -> bool:
        """Whether the template shows no system message but the first."""
        system, question, said = self._message("system", _SECOND), self._message("user", "hi"), self._said()
        conversations = ([system], [question]), ([system, question, said], [question])
        return any(self._loses("system", before, behind) for before, behind in conversations)

    def joins(self) -> frozenset[tuple[str, str]]:
        """The pairs of roles whose messages do not both show if one follows the other."""
        question = self._message("user", _SECOND)
        answered = [question, *self._call({}, False)[1:]]
        before = {"user": [question], "assistant": [question, self._said()], "tool": answered}
        pairs = (("user", "user"), ("assistant", "assistant"), ("tool", "user"))
        return frozenset(pair for pair in pairs if self._loses(pair[1], before[pair[0]], []))

    def _loses(self, role: str, before: list[Message], behind: list[Message]) -> bool:
        """Whether the template, which shows the second sentinel, does not show both with a message of ``role`` in
        between."""
        for tools in (None, [_TOOL]):
            plain = self._render([*before, *behind], tools)
            shown = self._render([*before, self._message(role, _FIRST), *behind], tools)
            if _SECOND in plain and not (_FIRST in shown and _SECOND in shown):
                return not self.is_late
        return False

    def _places(self, role: str) -> list[_Place]:
        """The places of a content of ``role`` that templates treat differently."""
        question, said = self._message("user", "hi"), self._said()
        match role:
            case "user":
                return [([], {}, []), ([question, said], {}, [])]
            case "assistant":
                calls = [{"tool_calls": [call]} for call in (_call({}), _call("{}"))]
                return [([question], {}, [question]), *(([question], one, [self._answer()]) for one in calls)]
        return [([], {}, [question]), ([question, said], {}, [question])]

    def _shown(self, role: str, content: Content, place: _Place, tools: list[Any] | None) -> str:
        before, beside, behind = place
        return self._render([*before, {"role": role, "content": content, **beside}, *behind], tools)

    def _call(self, arguments: Any, null_content: bool) -> list[Message]:
        calling = self._message("assistant", "") | {"tool_calls": [_call(arguments)]}
        return [self._message("user", "hi"), calling | ({"content": None} if null_content else {}), self._answer()]

    def _answer(self, call_id: str = _CALL_ID, text: str = "ok") -> Message:
        return self._message("tool", text) | {"name": "probe", "tool_call_id": call_id}

    def _said(self) -> Message:
        return self._message("assistant", "ok")

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": self.forms.get(role, ContentForm()).content(text)}

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt; empty if the template refuses the messages."""
        if self.is_late:
            return ""
        variables = {**self._variables, **(options or {}), "tools": tools, "messages": messages}
        try:
            text, took_s = self._template.timed(variables, self._left_s, _DAY)
        except TemplateRefusal as error:
            text, took_s = "", error.cpu_s
        self._left_s -= took_s
        return text


def _call(arguments: Any, call_id: str = _CALL_ID) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}


def _part(text: str) -> Part:
    return {"type": "text", "text": text}
