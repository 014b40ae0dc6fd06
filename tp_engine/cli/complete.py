"""``tp-engine complete``: texts from the terminal, a file or ``--quick``, continued by the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tp_engine.cli.client_config import ClientConfig, parse_client
from tp_engine.cli.server_client import ServerClient, ServerError
from tp_engine.cli.session import Ask, ask_person, connected, finish_note, note, show

PROMPT = "text> "


def main(argv: Sequence[str]) -> int:
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
    """Stream what follows ``text``; returns a note on its end.  Ctrl-C ends it."""
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
            line = ask(PROMPT)
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
