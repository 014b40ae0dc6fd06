"""From the blocks of a Messages body to the messages of a chat.

::

    block                                     in the chat
    text                                      text of the message
    tool_result                               a message of the role tool; texts before it stay before it
    thinking, what this server sealed of it   the reasoning of the assistant's message
    tool_use                                  a call of the assistant's message; what follows begins another message
    document of text                          its text
    image, also in OpenAI's form              an image of its message, or of a tool's answer
    document of blocks, search_result         its texts and images
    document of a PDF                         its pages, as images
    document of another kind, and an image
    where the model takes none                refused; in a tool's answer a note, lest it end the conversation
    what a server's own tool found, a summary
    of earlier turns                          its texts and images, as the assistant's
    redacted_thinking of another server, and
    what else a server's own tool did         nothing; the log says so
    tool_addition, tool_removal               nothing; the list of tools changes
    a system message after the first turn     a message of the user in its place, so that earlier prompts stay prefixes
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tp_engine.api.anthropic.protocol import Block, Message
from tp_engine.api.openai.chat.messages import FAILED, omitted
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.errors import RequestError, shown
from tp_engine.images.sources import DocumentSource, ImageSource, image_source, is_document_part, is_image_part
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

ChatMessages = list[dict[str, Any]]

# Claude Code begins its system prompt with a block that changes with each request; no prefix after it could be cached.
_BILLING = "x-anthropic-billing-header"
# Blocks that only Anthropic's servers write or read; some have texts.
_UNTOLD = frozenset({
    "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result", "compaction",
    "container_upload", "fallback", "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use", "redacted_thinking",
    "server_tool_use", "text_editor_code_execution_tool_result", "tool_search_tool_result", "web_fetch_tool_result",
    "web_search_tool_result",
})  # fmt: skip
_FILES = ("base64", "url")  # types of sources
# Blocks that change the list of tools (``requests.py``) and are not text.
TOOL_CHANGES = frozenset({"tool_addition", "tool_removal"})


def chat_messages(
    system: str | Sequence[Block] | None,
    messages: Sequence[Message],
    *,
    takes_images: bool = False,
    seal: ReasoningSeal | None = None,
) -> ChatMessages:
    """The chat; raises ``RequestError``, which names the faulty block.  ``seal`` opens sealed thinking."""
    chat: ChatMessages = []
    leading = [] if system is None else [*_texts("system", system, takes_images=takes_images)]
    last_user = max((number for number, one in enumerate(messages) if one.role == "user"), default=-1)
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        is_cleared = message.clear_at == "next_user_message" and number < last_user
        if message.role == "system" and (is_cleared or message.content is None):
            continue
        if message.content is None:
            raise _refused(f"{where} is missing; it must be text, or a list of blocks")
        if message.role == "system" and not chat:
            leading += _texts(where, message.content, takes_images=takes_images)
        elif message.role == "assistant":
            _add_assistant(chat, where, message.content, takes_images=takes_images, seal=seal)
        else:
            _add_user(chat, where, message.content, takes_images=takes_images)
    return [{"role": "system", "content": "\n\n".join(leading)}, *chat] if leading else chat


def _add_user(chat: ChatMessages, where: str, content: str | Sequence[Block], *, takes_images: bool) -> None:
    """A turn of the user: consecutive texts and images become one message, as templates require."""
    for place, block in _blocks(where, content):
        if block["type"] == "tool_result":
            called, answer = _string(place, block, "tool_use_id"), _answer(place, block, takes_images=takes_images)
            chat.append({"role": "tool", "tool_call_id": called, "content": answer})
            continue
        parts = _parts(place, block, takes_images=takes_images)
        if parts and (not chat or chat[-1]["role"] != "user"):
            chat.append({"role": "user", "content": []})
        if parts:
            chat[-1]["content"] += parts


def _answer(where: str, block: Block, *, takes_images: bool) -> str | list[Any]:
    """A tool's answer: a text, or parts if it has images."""
    content = block.get("content")
    if not takes_images or not isinstance(content, list) or not _has_image(content):
        return _result(where, block)
    return _parts_of(f"{where}.content", content, in_result=True)


def _parts(where: str, block: Block, *, takes_images: bool, in_result: bool = False) -> list[Any]:
    """The texts and images of a block; none if the model need not see it."""
    source = block.get("source")
    if takes_images and _is_image(block):
        return [_image(where, block)]
    if takes_images and block["type"] in _UNTOLD:
        content = block.get("content")
        if images := [*_found_images(f"{where}.content", content)]:
            return [*map(_text_part, _found(content)), *images]
    if takes_images and block["type"] == "search_result" and _has_image(found := _listed(block.get("content"))):
        head = _joined(block.get("title"), source)
        return [_text_part(head), *_parts_of(f"{where}.content", found, in_result=in_result)]
    if takes_images and block["type"] == "document" and isinstance(source, Mapping):
        head, blocks = _joined(block.get("title"), block.get("context")), source.get("content")
        if isinstance(blocks, list) and _has_image(blocks):
            inner = _parts_of(f"{where}.source.content", blocks, in_result=in_result)
            return [*([_text_part(head)] if head else ()), *inner]
        if source.get("type") in _FILES:
            pdf = _file(where, source, DocumentSource)
            return [*([_text_part(head)] if head else ()), pdf]
    text = _text(where, block, in_result=in_result, takes_images=takes_images)
    return [] if text is None else [_text_part(text)]


def _parts_of(where: str, blocks: Sequence[Any], *, in_result: bool) -> list[Any]:
    """The texts and images of ``blocks``, for a model that takes images."""
    found = (_parts(place, block, takes_images=True, in_result=in_result) for place, block in _blocks(where, blocks))
    return [part for parts in found for part in parts]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _has_image(blocks: Sequence[object]) -> bool:
    """Whether ``blocks`` have an image, also in a document or a search result."""
    return any(_is_image(one) or _holds_image(one) for one in blocks)


def _holds_image(block: object) -> bool:
    if not isinstance(block, Mapping) or block.get("type") not in ("document", "search_result"):
        return False
    source = block.get("source")
    if isinstance(source, Mapping):
        return source.get("type") in _FILES or _has_image(_listed(source.get("content")))
    return _has_image(_listed(block.get("content")))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_image(block: object) -> bool:
    return is_image_part(block) and not is_document_part(block)


def _image(where: str, block: Mapping[str, Any]) -> ImageSource:
    source = block.get("source")
    if source is None:  # in OpenAI's form, or that of MCP
        return image_source(where, block)
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in _FILES:
        raise _refused(f"{where}.source.type is {shown(kind)}; it must be base64 or url")
    return _file(where, source, ImageSource)


def _file(where: str, source: Mapping[str, Any], made: type[ImageSource]) -> ImageSource:
    """The file of a block's source, which is one of ``_FILES``."""
    if source["type"] == "url":
        return made(where=where, content=_string(f"{where}.source", source, "url"))
    media_type, data = (_string(f"{where}.source", source, name) for name in ("media_type", "data"))
    is_url = data.lstrip()[:5].lower() == "data:"  # some clients send it whole
    return made(where=where, content=data if is_url else f"data:{media_type};base64,{data}")


def _add_assistant(
    chat: ChatMessages,
    where: str,
    content: str | Sequence[Block],
    *,
    takes_images: bool,
    seal: ReasoningSeal | None,
) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": []}
    if chat and chat[-1]["role"] == "assistant":
        message = chat.pop()
    for place, block in _blocks(where, content):
        thought = _thought(place, block, seal)
        if "tool_calls" in message and (thought or (block["type"] == "text" and block.get("text"))):
            chat.append(message)
            message = {"role": "assistant", "content": []}
        if thought is not None:
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif block["type"] == "tool_use":
            given = block.get("input") or {}
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            function = {"name": _string(place, block, "name"), "arguments": arguments}
            call = {"id": _string(place, block, "id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            message["content"] += _parts(place, block, takes_images=takes_images)
    chat.append(message)


def _thought(where: str, block: Block, seal: ReasoningSeal | None) -> str | None:
    """The thinking of a block, sealed or plain; None for other blocks, and for what others sealed."""
    kind = block["type"]
    text = _string(where, block, "thinking") if kind == "thinking" else None
    sealed = block.get({"thinking": "signature", "redacted_thinking": "data"}.get(kind, ""))
    opened = seal.opened(sealed) if seal is not None and not text and isinstance(sealed, str) else None
    return text if opened is None else opened


def _blocks(where: str, content: str | Sequence[Block]) -> Iterator[tuple[str, Block]]:
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(block, Mapping):
            raise _refused(f"{place} is {shown(block)}; it must be a block such as {{'type': 'text', 'text': ...}}")
        if not isinstance(block.get("type"), str):
            raise _refused(f"{place}.type is {shown(block.get('type'))}; it must be text, such as 'text'")
        yield place, block


def _texts(where: str, content: str | Sequence[Block], *, takes_images: bool) -> list[str]:
    """The texts of a system prompt, without the one for billing."""
    texts = (_text(place, block, takes_images=takes_images) for place, block in _blocks(where, content))
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _result(where: str, block: Block, *, in_result: bool = True) -> str:
    """The text of a tool's answer, or of a document."""
    content = block.get("content")
    if not content and block.get("is_error") is True:
        return FAILED
    if content is None:
        return ""
    are_blocks = isinstance(content, list) and all(isinstance(one, Mapping) for one in content)
    if not are_blocks and not isinstance(content, str):
        raise _refused(f"{where}.content must be text, or a list of blocks")
    texts = (_text(place, one, in_result=in_result) for place, one in _blocks(f"{where}.content", content))
    return "\n".join(text for text in texts if text is not None)


def _text(where: str, block: Block, *, in_result: bool = False, takes_images: bool = False) -> str | None:
    """The text of a block; None if the model need not see it."""
    kind = block["type"]
    if kind in TOOL_CHANGES:
        return None
    if kind in _UNTOLD and (found := "\n".join(_found(block.get("content")))):
        return found
    if kind in _UNTOLD:
        warn_once(logger, "blocks of the type %s are left out of messages: they tell the model nothing", kind)
        return None
    read = _TEXTS.get(kind)
    text = None if read is None else read(where, block, in_result)
    if text is None and in_result:
        return omitted(kind)
    if text is None:
        reads = "it is not read there" if takes_images else "this model reads text only"
        raise _refused(f"{where} is a block of type {shown(kind)}; {reads}, send it as text")
    return text


def _found_images(where: str, content: object) -> Iterator[ImageSource]:
    """The images of what a server's own tool found."""
    if isinstance(content, list):
        for number, one in enumerate(content):
            yield from _found_images(f"{where}[{number}]", one)
    elif isinstance(content, Mapping) and _is_image(content):
        yield _image(where, content)
    elif isinstance(content, Mapping):
        for name in ("content", "source"):
            yield from _found_images(f"{where}.{name}", content.get(name))


def _found(content: object) -> Iterator[str]:
    """The texts of what a server's own tool found: of blocks, of programs' outputs, and of documents."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (text for one in content for text in _found(one))
    elif isinstance(content, Mapping):
        names = ("text", "stdout", "stderr", *(("data",) if content.get("type") == "text" else ()))
        yield from (text for name in names if isinstance(text := content.get(name), str) and text)
        yield from _found(content.get("content"))
        yield from _found(source if isinstance(source := content.get("source"), Mapping) else None)


def _document(where: str, block: Block, in_result: bool) -> str | None:
    """The text of a document; None for one that is a file."""
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("text", "content"):
        return None
    if source["type"] == "text":
        body = _string(f"{where}.source", source, "data")
    else:
        body = _result(f"{where}.source", dict(source), in_result=in_result)
    return _joined(block.get("title"), block.get("context"), body)


def _joined(*parts: object) -> str:
    return "\n".join(part for part in parts if isinstance(part, str))


# The type of a block -> its text.
_TEXTS: Mapping[str, Callable[[str, Block, bool], str | None]] = {
    "text": lambda where, block, _: _string(where, block, "text"),
    "document": _document,
    "search_result": lambda where, block, in_result: _joined(
        block.get("title"), block.get("source"), _result(where, block, in_result=in_result)
    ),
    "tool_reference": lambda where, block, _: _string(where, block, "tool_name"),
}


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _refused(f"{where}.{name} is {shown(value)}; it must be text")
    return value


def _refused(text: str) -> RequestError:
    return RequestError(text, param="messages")
