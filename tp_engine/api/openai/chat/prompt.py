"""From chat messages to a prompt, through the chat template of the tokenizer or of the operator."""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from tp_engine.api.openai.chat.capabilities import TemplateCapabilities
from tp_engine.api.openai.chat.images import render_images
from tp_engine.api.openai.chat.messages import normal_messages
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.spellings import check_ending
from tp_engine.api.openai.chat.template import ChatTemplate, TemplateRefusal
from tp_engine.api.openai.reasoning import ReasoningFormat
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.api.openai.tools.tool_format import ToolFormat
from tp_engine.errors import ConfigError, RequestError, shown
from tp_engine.images.placeholders import Pieces
from tp_engine.images.sources import ImageSource
from tp_engine.system import env
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

# Set by this module; a request may not set them.
_RESERVED_OPTIONS = frozenset({"messages", "tokenize", "return_tensors", "return_dict", "tokenizer_kwargs"})

_MAX_TEMPLATES = 16
# Every template shows these, or an earlier module replaces them by roles that it shows.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MAX_OTHER_ROLES = 8


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat.

    ``role`` is that of the answer; ``last_text`` is the text of the last message if that has the same role.
    ``continued`` is the text that the model continues; None for a new message.  ``images`` stand between the
    ``pieces`` of the text, one between each two.  ``thinking_disabled``: the template is told to switch thinking off.
    """

    text: str
    role: str = "assistant"
    last_text: str = ""
    continued: str | None = None
    images: tuple[ImageSource, ...] = ()
    pieces: Pieces = ()
    thinking_disabled: bool = False


class ChatFormat:
    """Turns one model's chats into prompts, by a template, which gets contents in the form that it takes.  ``seal`` is
    for the reasoning that clients send back.

    Refuses every chat without a tokenizer or a template.  Safe to call from several threads.
    """

    def __init__(self, tokenizer: Any | None, options: ChatOptions | None = None) -> None:
        self.options = options or ChatOptions()
        self.seal = ReasoningSeal(self.options.reasoning_key or env.REASONING_KEY.read() or None)
        self._tokenizer = tokenizer
        self._served_text = self.options.template_text
        self._probed = lru_cache(_MAX_TEMPLATES)(self._probe)

    def close(self) -> None:
        """End the processes that render; another call starts them again."""
        self._probed.cache_clear()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any] | None = None,
        *,
        adapts_calls: bool = False,
        image_marker: str | None = None,
    ) -> ChatPrompt:
        """The prompt, up to the assistant's answer.  Raises ``RequestError``.

        ``adapts_calls``: calls and answers of tools come in turns, and with ids, that the template takes; calls that it
        does not show are written into the message's content, as the model writes them; the template gets the switches
        of thinking under its own names (``ThinkingForm``).

        ``image_marker`` is what the template writes for an image; None: the model takes none.

        ``add_generation_prompt``, ``continue_final_message``, ``tools``, ``documents`` and ``chat_template`` (a text,
        or the name of one of the tokenizer's) among ``template_options`` mean the same as in transformers; the
        template defines all others.
        """
        given = dict(template_options or {})
        if reserved := sorted(_RESERVED_OPTIONS & given.keys()):
            raise RequestError(f"{reserved[0]} is not an option of a chat template", param=reserved[0])
        begins, continues = _begins_or_continues(given)
        template, takes = self._template(given.pop("chat_template", None), with_tools=bool(given.get("tools")))
        given, thinking_disabled = takes.thinking.variables(given) if adapts_calls else (given, False)
        if given.get("tools") and self.tool_format is None:
            warn_once(
                logger, "the format of the model's tool calls is not known: those that it chooses to make stay text"
            )
        if given.get("tools") and not takes.shows_tools:
            warn_once(
                logger,
                "the chat template does not tell the model of a request's tools: serve with --chat-template and one "
                "that does",
            )
        if given.get("documents") and not template.mentions("documents"):
            raise RequestError(
                "the chat template shows the model no documents; write their texts into the messages",
                param="documents",
            )
        images: list[ImageSource] | None = None if image_marker is None else []
        conversation = normal_messages(messages, takes, self.tool_format, images, adapts_calls=adapts_calls)
        if not continues:
            check_ending(conversation[-1])
        variables = {
            **self._special_tokens(),
            "tools": None,
            "documents": None,
            **given,
            "messages": conversation,
            "add_generation_prompt": begins,
        }
        last_role, last_text = conversation[-1]["role"], _text(conversation[-1]["content"])
        role = "assistant" if begins else last_role
        render = _render_continued if continues else _render
        pieces: Pieces = ()
        shown: tuple[ImageSource, ...] = ()
        if images and image_marker is not None:
            pieces, shown = render_images(partial(render, template), variables, image_marker, images)
            text = image_marker.join(pieces)
        else:
            text = render(template, variables)
        _check_roles(conversation, template, text)
        return ChatPrompt(
            text,
            role=role,
            last_text=last_text if role == last_role else "",
            continued=last_text if continues else None,
            images=shown,
            pieces=pieces,
            thinking_disabled=thinking_disabled,
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if it is not known, or not wanted."""
        found = self.options.tool_format(self._source(with_tools=True) or "")
        return None if found is None else found.for_tokens(TokenWriting.of(self._tokenizer).apart)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of the model's reasoning; as ``tool_format``."""
        found = self.options.reasoning_format(self._source(with_tools=True) or "")
        return None if found is None else found.for_tokens(TokenWriting.of(self._tokenizer).apart)

    @cached_property
    def writes_pairs(self) -> bool:
        """Whether the template is for scores: it writes messages of the roles query and document."""
        source = self._source(with_tools=False) or ""
        return all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document"))

    def prepare(self) -> None:
        """Compile and probe the default templates, so that no chat waits for it.

        The log says in which formats answers are read.
        """
        self.options.log_formats(self._source(with_tools=True) or "")
        for with_tools in (False, True):
            with contextlib.suppress(RequestError):  # each chat is told
                self._template(None, with_tools=with_tools)

    def _template(self, given: str | None, *, with_tools: bool) -> tuple[ChatTemplate, TemplateCapabilities]:
        own = getattr(self._tokenizer, "chat_template", None)
        named = own if isinstance(own, Mapping) else {}
        text = named.get(given, given) or self._source(with_tools=with_tools)
        if self._tokenizer is None or not text:
            names = ", ".join(map(repr, named))
            several = f"none of the model's chat templates ({names}) is the default"
            raise RequestError(
                f"{several if names else 'the model has no chat template'}; send a prompt instead of messages, or "
                "serve it with --chat-template",
                param="messages",
                code="no_chat_template",
            )
        return self._probed(text)

    def _source(self, *, with_tools: bool) -> str | None:
        """The text of the template for chats without one."""
        own = getattr(self._tokenizer, "chat_template", None)
        if isinstance(own, Mapping):  # the one named for tools, or the default
            own = (own.get("tool_use") if with_tools else None) or own.get("default")
        return self._served_text or own

    def _probe(self, text: str) -> tuple[ChatTemplate, TemplateCapabilities]:
        try:
            template = ChatTemplate(text)
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from error
        content_format = self.options.chat_template_content_format
        return template, TemplateCapabilities.of(template, self._special_tokens(), content_format)

    def _special_tokens(self) -> dict[str, Any]:
        return dict(getattr(self._tokenizer, "special_tokens_map", {}))


def _begins_or_continues(given: dict[str, Any]) -> tuple[bool, bool]:
    """Remove two options from ``given``: whether the prompt begins a new message, and whether it leaves the last one
    open."""
    continues, begins = bool(given.pop("continue_final_message", False)), given.pop("add_generation_prompt", None)
    if continues and begins:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true; the model either continues the last "
            "message or begins one: leave one of them out",
            param="continue_final_message",
        )
    return not continues if begins is None else bool(begins), continues


def _check_roles(messages: Sequence[Mapping[str, Any]], template: ChatTemplate, prompt: str) -> None:
    """Refuse a role that is not in the ``prompt``: most templates skip a message whose role they do not know."""
    first = {message["role"]: message for message in reversed(messages) if message["role"] not in _ROLES}
    if len(first) > _MAX_OTHER_ROLES:
        raise RequestError(f"messages have {len(first)} other roles than {_names()}", param="messages")
    for role, message in first.items():
        given = message["content"] or ""
        texts = [given] if isinstance(given, str) else [part.get("text", "") for part in given]
        if not any(one.strip() in prompt for one in texts) and not template.mentions(role):
            raise RequestError(
                f"a message has the role {shown(role, 40)}, which the chat template passes over; give one of "
                f"{_names()}",
                param="messages",
            )


def _names() -> str:
    return ", ".join(sorted(_ROLES))


def _render(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except TemplateRefusal as error:
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The content of a normal message as one text."""
    return content or "" if isinstance(content, str | None) else "\n".join(part.get("text", "") for part in content)


def _render_continued(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's text; a mark after that text finds the place.

    The mark ends with a space: if the template strips contents, the space is gone.
    """
    mark = f"END-{uuid.uuid4().hex} "
    *others, last = variables["messages"]
    content = last["content"] or ""
    marked: str | list[Any]
    if isinstance(content, list):
        marked = [*content[:-1], {**content[-1], "text": content[-1].get("text", "") + mark}]
    else:
        marked = content + mark
    messages = [*others, {**last, "content": marked}]
    before, found, after = _render(template, {**variables, "messages": messages}).rpartition(mark.rstrip())
    if not found:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message's content", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
