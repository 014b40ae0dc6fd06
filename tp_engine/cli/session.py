"""What ``chat`` and ``complete`` have in common: a server, lines from a person, text as it comes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tp_engine.cli.client_config import ClientConfig
from tp_engine.cli.own_server import own_server
from tp_engine.cli.server_client import ServerClient
from tp_engine.config import EngineConfig
from tp_engine.options import Options

Ask = Callable[[str], str]  # a prompt -> the line; EOFError at the end, KeyboardInterrupt for Ctrl-C


@contextlib.contextmanager
def connected(options: Options, name: str, kind: type[ClientConfig]) -> Iterator[tuple[ServerClient, str]]:
    """A client and the model's name: of ``--url``, or of a server that lives as long as this session."""
    config, engine = options.build(name, kind), options.given["engine"]
    with contextlib.ExitStack() as stack:
        if config.url is not None:
            client = ServerClient(config.url, api_key=config.key, timeout_s=config.timeout_s)
            wanted: str | None = engine.get("model")
        else:
            EngineConfig(**engine)
            note(f"loading {engine.get('model') or 'the demo model'} ...")
            server = stack.enter_context(own_server(engine))
            client, wanted = ServerClient(server.url, api_key=server.api_key, timeout_s=config.timeout_s), None
        yield client, client.model(wanted)


def ask_person(prompt: str) -> str:
    """A line from the terminal, with its history, or from a file without a prompt."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
        return input(prompt)
    return input()


def show(text: str) -> None:
    """A piece of an answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """What is not a part of any answer."""
    print(text, file=sys.stderr, flush=True)


def finish_note(choice: dict[str, Any]) -> str | None:
    """What a person should know of an answer's end, if anything."""
    return "(cut off: --max-tokens or the model's length is reached)" if choice["finish_reason"] == "length" else None
