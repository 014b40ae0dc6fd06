"""``tp-engine chat``, a conversation at the terminal, and ``tp-engine complete``, texts continued by the model.

Ctrl-C stops an answer and keeps what has arrived; at the prompt it clears the line.  Ctrl-D or /exit leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tp_engine.cli.session import (
    Ask,
    ClientConfig,
    ServerClient,
    ServerError,
    ask_person,
    connected,
    finish_note,
    note,
    parse_client,
    show,
)
from tp_engine.errors import did_you_mean
from tp_engine.options.fields import option

CHAT_PROMPT = "> "
TEXT_PROMPT = "text> "
COMMANDS = {"/reset": "forget the conversation", "/exit": "leave (or Ctrl-D)", "/help": "these commands"}


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ClientConfig):
    """A conversation's options."""

    system_prompt: str | None = option(None, "what the model is told before the conversation begins")


class Conversation:
    """The messages so far; ``say`` adds a pair."""

    def __init__(self, client: ServerClient, model: str, config: ChatConfig, show: Callable[[str], None]) -> None:
        self._client = client
        self._body = {"model": model, **config.sampling}
        self._system = config.system_prompt
        self._show = show
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> str | None:
        """Stream the answer to ``text``; returns a note on its end.

        Ctrl-C ends the answer; what has arrived stays in the conversation.  ``ServerError`` leaves the conversation as
        it was.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        ending = None
        try:
            for chunk in self._client.stream("/v1/chat/completions", self._body | {"messages": self.messages}):
                for choice in chunk["choices"]:
                    self._show_delta(choice["delta"], answer)
                    ending = finish_note(choice) or ending
        except KeyboardInterrupt:
            ending = "(stopped)"
        except ServerError:
            self.messages.pop()
            raise
        finally:
            self._show("\n")
        self.messages.append({"role": "assistant", "content": "".join(answer)})
        return ending

    def _show_delta(self, delta: dict[str, str | None], answer: list[str]) -> None:
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self._show(reasoning)
        if content := delta.get("content"):
            answer.append(content)
            self._show(content)


def chat_command(argv: Sequence[str]) -> int:
    """Talk until the end of the input."""
    options = parse_client("tp-engine chat", "Talk to a model.", "chat", ChatConfig, argv)
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
    """One line after the other, until ``ask`` raises ``EOFError`` or /exit comes."""
    while True:
        try:
            line = ask(CHAT_PROMPT).strip()
        except KeyboardInterrupt:
            tell("")
            continue
        except EOFError:
            return
        if line == "/exit":
            return
        if line.startswith("/"):
            tell(_command(conversation, line))
        elif line:
            _answer(conversation, line, tell)


def _command(conversation: Conversation, line: str) -> str:
    if line == "/reset":
        conversation.reset()
        return "(forgotten)"
    if line == "/help":
        return "\n".join(f"{name:<8}{text}" for name, text in COMMANDS.items())
    return f"unknown command {line}{did_you_mean(line, COMMANDS)}"


def _answer(conversation: Conversation, line: str, tell: Callable[[str], None]) -> None:
    try:
        ending = conversation.say(line)
    except ServerError as error:
        tell(f"error: {error}")
        return
    if ending is not None:
        tell(ending)


def complete_command(argv: Sequence[str]) -> int:
    """Continue one text, or line after line."""
    options = parse_client("tp-engine complete", "Continue a text.", "complete", ClientConfig, argv)
    with connected(options, "complete", ClientConfig) as (client, model):
        config = options.build("complete", ClientConfig)
        if config.quick is not None:
            complete(client, model, config, config.quick, show)
            return 0
        note(f"{model} at {client.url}; Ctrl-D leaves")
        complete_lines(client, model, config, ask_person)
    return 0


def complete(
    client: ServerClient, model: str, config: ClientConfig, text: str, show_piece: Callable[[str], None]
) -> str | None:
    """Stream the continuation of ``text``; returns a note on its end.  Ctrl-C ends it."""
    ending = None
    try:
        for chunk in client.stream("/v1/completions", {"model": model, "prompt": text, **config.sampling}):
            for choice in chunk["choices"]:
                show_piece(choice["text"])
                ending = finish_note(choice) or ending
    except KeyboardInterrupt:
        ending = "(stopped)"
    finally:
        show_piece("\n")
    return ending


def complete_lines(client: ServerClient, model: str, config: ClientConfig, ask: Ask) -> None:
    """One line after the other, until the end of the input."""
    while True:
        try:
            line = ask(TEXT_PROMPT)
        except KeyboardInterrupt:
            note("")
            continue
        except EOFError:
            return
        if not line:
            continue
        try:
            ending = complete(client, model, config, line, show)
        except ServerError as error:
            ending = f"error: {error}"
        if ending is not None:
            note(ending)
