"""From chat messages to a prompt, through the chat template that comes with the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.errors import RequestError

# Decided here, not by whoever writes the messages.
_RESERVED_OPTIONS = frozenset({"conversation", "tokenize", "return_tensors", "return_dict", "tokenizer_kwargs"})


def render_chat(tokenizer: Any | None, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """The prompt as text, up to where the assistant answers; ``options`` go to the template.  Raises RequestError."""
    if tokenizer is None or not (options.get("chat_template") or tokenizer.chat_template):
        raise RequestError(
            "the model has no chat template; send a prompt instead of messages, or serve a model with a template",
            param="messages",
        )
    if reserved := sorted(_RESERVED_OPTIONS & options.keys()):
        raise RequestError(f"{reserved[0]} is not an option of a chat template", param=reserved[0])
    conversation = check_messages(messages)
    template_options = {"add_generation_prompt": not options.get("continue_final_message", False), **options}
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **template_options))
    except Exception as error:  # a template is a program that came with the model, and raises whatever it likes
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with every ``content`` as text; parts other than text are refused by name."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r}; it must have a role and a content", param="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; it must be text such as 'user'", param="messages")
    if content is None and role != "assistant":
        raise RequestError(f"{where} has no content; it must be text, or a list of text parts", param="messages")
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(where, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"{where}.content must be text, or a list of text parts", param="messages")
    return {**message, "content": content or ""}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"{where}.content has a part of type {kind!r}; only text is supported", param="messages")
