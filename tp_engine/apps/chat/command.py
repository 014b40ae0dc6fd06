"""``tp-engine chat``, a conversation at the terminal, and ``tp-engine complete``, texts continued by the model.

Ctrl-C stops an answer and keeps what has arrived; at the prompt it clears the line.  Ctrl-D or /exit leaves.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tp_engine.api.server_client import ChunkChoice, ServerClient, ServerError
from tp_engine.apps.chat.session import (
    Ask,
    ClientConfig,
    ask_person,
    connected,
    finish_note,
    note,
    parse_client,
    print_config,
    show,
)
from tp_engine.errors import ConfigError, did_you_mean
from tp_engine.options.fields import checked, option
from tp_engine.system.files import read_bytes
from tp_engine.system.units import MIB

_MAX_IMAGE_BYTES = 32 * MIB
CHAT_PROMPT = "> "
TEXT_PROMPT = "text> "
COMMANDS = {"/reset": "forget the conversation", "/exit": "leave (or Ctrl-D)", "/help": "these commands"}


@checked()
@dataclass(frozen=True, kw_only=True)
class ChatConfig(ClientConfig):
    """A conversation's options."""

    system_prompt: str | None = option(None, "what the model is told before the conversation begins")
    image: tuple[str, ...] = option((), "files of images that the first message shows, to a model that sees images")

    def image_parts(self) -> list[dict[str, Any]]:
        """The images as parts of a message; ``ConfigError`` for a file that cannot be read."""
        parts = []
        for name in self.image:
            try:
                data = base64.b64encode(read_bytes(Path(name).expanduser(), _MAX_IMAGE_BYTES)).decode()
            except OSError as error:
                raise ConfigError(f"image is {name!r}, which cannot be read: {error.strerror}") from error
            url = f"data:application/octet-stream;base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return parts


class Conversation:
    """The messages so far; ``say`` adds a pair."""

    def __init__(self, client: ServerClient, model: str, config: ChatConfig, show: Callable[[str], None]) -> None:
        self._client = client
        self._body = {"model": model, **config.sampling}
        self._system = config.system_prompt
        self._images = config.image_parts()
        self._show = show
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> str | None:
        """Stream the answer to ``text``; returns a note on its end.

        Ctrl-C ends the answer; what has arrived stays in the conversation.  ``ServerError`` leaves the conversation as
        it was.
        """
        content: Any = [*self._images, {"type": "text", "text": text}] if self._images else text
        self.messages.append({"role": "user", "content": content})
        answer: list[str] = []

        def show_delta(choice: ChunkChoice) -> None:
            delta = choice.delta
            if reasoning := delta.reasoning_content or delta.reasoning:
                self._show(reasoning)
            if delta.content:
                answer.append(delta.content)
                self._show(delta.content)

        body = self._body | {"messages": self.messages}
        try:
            ending = _stream(self._client, "/v1/chat/completions", body, show_delta, self._show)
        except ServerError:
            self.messages.pop()
            raise
        self._images = []
        self.messages.append({"role": "assistant", "content": "".join(answer)})
        return ending


def chat_command(argv: Sequence[str]) -> int:
    """Talk until the end of the input."""
    options = parse_client("tp-engine chat", "Talk to a model.", "chat", ChatConfig, argv)
    if options.print_config:
        return print_config(options)
    with connected(options, "chat", ChatConfig) as (client, model):
        config = options.build("chat", ChatConfig)
        conversation = Conversation(client, model, config, show)
        if config.quick is not None:
            conversation.say(config.quick)
            return 0
        note(f"{model} at {client.url}; /help tells the commands")
        converse(conversation, ask_person, note)
    return 0


def converse(conversation: Conversation, ask: Ask, tell: Callable[[str], None]) -> None:
    """Take lines until ``ask`` raises ``EOFError`` or /exit comes."""
    for line in map(str.strip, _lines(ask, CHAT_PROMPT, tell)):
        if line == "/exit":
            return
        if line.startswith("/"):
            tell(_command(conversation, line))
        elif line:
            _answer(partial(conversation.say, line), tell)


def _command(conversation: Conversation, line: str) -> str:
    if line == "/reset":
        conversation.reset()
        return "(forgotten)"
    if line == "/help":
        return "\n".join(f"{name:<8}{text}" for name, text in COMMANDS.items())
    return f"unknown command {line}{did_you_mean(line, COMMANDS)}"


def _answer(answer: Callable[[], str | None], tell: Callable[[str], None]) -> None:
    """Show the note on an answer's end, or the server's error."""
    try:
        ending = answer()
    except ServerError as error:
        ending = f"error: {error}"
    if ending is not None:
        tell(ending)


def complete_command(argv: Sequence[str]) -> int:
    """Continue one text, or line after line."""
    options = parse_client("tp-engine complete", "Continue a text.", "complete", ClientConfig, argv)
    if options.print_config:
        return print_config(options)
    with connected(options, "complete", ClientConfig) as (client, model):
        config = options.build("complete", ClientConfig)
        if config.quick is not None:
            complete(client, model, config, config.quick, show)
            return 0
        note(f"{model} at {client.url}; Ctrl-D leaves")
        for line in filter(None, _lines(ask_person, TEXT_PROMPT, note)):
            _answer(partial(complete, client, model, config, line, show), note)
    return 0


def complete(
    client: ServerClient, model: str, config: ClientConfig, text: str, show_piece: Callable[[str], None]
) -> str | None:
    """Stream the continuation of ``text``; returns a note on its end.  Ctrl-C ends it."""
    body = {"model": model, "prompt": text, **config.sampling}
    return _stream(client, "/v1/completions", body, lambda choice: show_piece(choice.text), show_piece)


def _stream(
    client: ServerClient,
    path: str,
    body: Mapping[str, Any],
    show_choice: Callable[[ChunkChoice], None],
    show_piece: Callable[[str], None],
) -> str | None:
    """Show the choices of a streamed answer, and a line end; returns a note on its end.  Ctrl-C ends it."""
    ending = None
    try:
        for chunk in client.stream(path, body):
            for choice in chunk.choices:
                show_choice(choice)
                ending = finish_note(choice) or ending
    except KeyboardInterrupt:
        ending = "(stopped)"
    finally:
        show_piece("\n")
    return ending


def _lines(ask: Ask, prompt: str, tell: Callable[[str], None]) -> Iterator[str]:
    """Take lines until ``ask`` raises ``EOFError``; Ctrl-C clears a line."""
    while True:
        try:
            line = ask(prompt)
        except KeyboardInterrupt:
            tell("")
            continue
        except EOFError:
            return
        yield line
